"""`patchproof report`: run folders as one page that explains itself, with figures and tables beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from patchproof.cli._terminal import Console
from patchproof.config import ReportConfig


def report(runs: list[Path], /, *, config: Annotated[ReportConfig, Parameter(name="*")] = ReportConfig()) -> int:
    """Show one run in depth or several side by side: an HTML page without network, SVG and PNG, tables.

    Parameters
    ----------
    runs
        Folders of `certify`, `attack` and `train` runs; they are read, not changed.
    """
    from patchproof.report import Options, build_report, notice_groups

    console = Console()
    options = Options(title=config.title, dataset=config.dataset, data_dir=config.data_dir, images=config.images)
    made = build_report(runs, options)
    page = made.write(config.output or default_output(runs))
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
