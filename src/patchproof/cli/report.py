"""`patchproof report`: run folders as one page that explains itself, with figures and tables beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from patchproof.cli._settings import ReportSettings
from patchproof.cli._show import Console


def report(runs: list[Path], settings: ReportSettings) -> int:
    """Show one run in depth or several side by side: an HTML page without network, SVG and PNG, tables.

    Parameters
    ----------
    runs
        Folders of `certify`, `attack` and `train` runs; they are read, not changed.
    """
    from patchproof.report import Options, build_report, notice_groups

    console = Console()
    options = Options(
        title=settings.title, dataset=settings.dataset, data_dir=settings.data_dir, images=settings.images
    )
    made = build_report(runs, options)
    page = made.write(settings.output or default_output(runs))
    for names, texts in notice_groups(made.notices).items():
        about = f"{names}: " if names else ""
        for text in texts:
            console.print(f"[yellow]note:[/] {escape(about + text)}", soft_wrap=True, highlight=False)
    console.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)
    return 0


def default_output(runs: Sequence[Path]) -> Path:
    """`report` inside a single run; for several, below `runs` under a name that the same runs get again."""
    folders = sorted({str(run.resolve()) for run in runs})
    if len(folders) == 1:
        return runs[0] / "report"
    digest = hashlib.sha256("\n".join(folders).encode("utf-8", "surrogateescape")).hexdigest()
    return Path("runs") / f"report-{len(folders)}-runs-{digest[:8]}"
