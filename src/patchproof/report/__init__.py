"""Run folders as pages, figures and tables that explain themselves."""

from patchproof.report._build import Options as Options
from patchproof.report._build import Report as Report
from patchproof.report._build import build_report as build_report
from patchproof.report._build import notice_groups as notice_groups
from patchproof.report._figures import Picture as Picture
from patchproof.report._figures import draw_errors as draw_errors
from patchproof.report._figures import drawing as drawing
from patchproof.report._figures import percent_axis as percent_axis
from patchproof.report._figures import series_style as series_style
from patchproof.report._tables import Cell as Cell
from patchproof.report._tables import Column as Column
from patchproof.report._tables import Table as Table
from patchproof.report._tables import csv_text as csv_text
from patchproof.report._tables import markdown as markdown
