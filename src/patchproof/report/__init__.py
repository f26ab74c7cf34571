"""Run folders as pages, figures and tables that explain themselves."""

from patchproof.report._build import Options, Report, build_report
from patchproof.report._figures import Picture
from patchproof.report._gallery import open_images
from patchproof.report._page import notice_groups
from patchproof.report._runs import CertifyRun, TrainRun, load_runs
from patchproof.report._text import class_words
from patchproof.report._worst_masks import worst_masks

__all__ = [
    "CertifyRun",
    "Options",
    "Picture",
    "Report",
    "TrainRun",
    "build_report",
    "class_words",
    "load_runs",
    "notice_groups",
    "open_images",
    "worst_masks",
]
