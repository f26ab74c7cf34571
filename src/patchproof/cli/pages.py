"""`patchproof report` and `patchproof explore`: runs and single images in the browser."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from pathlib import Path

from patchproof.cli._settings import ExploreSettings, ReportSettings, chosen, part
from patchproof.cli._show import Console, print_json

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def report(runs: list[Path], settings: ReportSettings) -> int:
    from patchproof.report import Options, build_report, notice_groups

    made = build_report(runs, part(settings, Options))
    folders = sorted({str(run.resolve()) for run in runs})
    digest = hashlib.sha256("\n".join(folders).encode("utf-8", "surrogateescape")).hexdigest()
    several = Path("runs") / f"report-{len(folders)}-runs-{digest[:8]}"  # the same runs get the same folder again
    page = made.write(settings.output or (several if len(folders) > 1 else runs[0] / "report"))
    if settings.json:
        print_json({"report": str(page), "notices": made.notices})
        return 0
    console = Console()
    for names, texts in notice_groups(made.notices).items():
        for text in texts:
            console.note(f"{names}: {text}" if names else text)
    console.plain(f"report: {page}")
    return 0


def explore(place: Path | None, settings: ExploreSettings) -> int:
    from patchproof.explore import open_explorer, require_gradio, serve
    from patchproof.models import embedded_checkpoint
    from patchproof.runs import choose_device

    require_gradio()
    console = Console()
    named = chosen(settings, "patch", "patches", "per_axis", "model", "weights", "dataset", "data_dir", "split")
    if place is None:
        place, named["dataset"] = embedded_checkpoint(), named["dataset"] or "fashion-mini"
    explorer = open_explorer(place, device=choose_device(settings.device), **named)
    for text in explorer.notices:
        console.note(text)
    if settings.host not in LOOPBACK:
        words = "whoever can reach this machine can use the page, without a password"
        console.note(f"listening on {settings.host}: {words}", "warning")
    with serve(explorer, host=settings.host, port=settings.port, open_browser=settings.open) as url:
        if settings.json:
            print_json({"explore": url})
        else:
            console.plain(f"explore: {url} (Ctrl-C ends it)")
        wait_for_ctrl_c()
    return 0


def wait_for_ctrl_c() -> None:
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
