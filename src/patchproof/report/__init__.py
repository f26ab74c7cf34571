"""Run folders as pages, figures and tables that explain themselves."""

from patchproof.report._build import Options, Report, build_report, notice_groups
from patchproof.report._figures import Picture, drawing, error_line, percent_axis, series_style
from patchproof.report._tables import Cell, Column, Table, csv_text, markdown
from patchproof.report._training import worst_masks
from patchproof.runs._reading import class_words

__all__ = [
    "Cell",
    "Column",
    "Options",
    "Picture",
    "Report",
    "Table",
    "build_report",
    "class_words",
    "csv_text",
    "drawing",
    "error_line",
    "markdown",
    "notice_groups",
    "percent_axis",
    "series_style",
    "worst_masks",
]
