"""Run folders as pages, figures and tables that explain themselves."""

from patchproof.report._build import Options, Report, build_report
from patchproof.report._figures import Picture
from patchproof.report._page import notice_groups
from patchproof.report._worst_masks import worst_masks

__all__ = ["Options", "Picture", "Report", "build_report", "notice_groups", "worst_masks"]
