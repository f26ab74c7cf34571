"""`patchproof explore`: single images of a run, or of one's own, in the browser."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.markup import escape

from patchproof.cli._settings import ExploreSettings
from patchproof.cli._setup import choose_device
from patchproof.cli._show import Console

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def explore(place: Path, settings: ExploreSettings) -> int:
    """Look at single images in the browser: their two-mask table, and what the defence does with a patch on them.

    Parameters
    ----------
    place
        Folder of a `certify`, `attack` or `train` run, or a checkpoint folder.
    """
    from patchproof.explore import open_explorer, require_gradio, serve

    require_gradio()
    console = Console(soft_wrap=True, highlight=False)
    explorer = open_explorer(
        place,
        device=choose_device(settings.device),
        patch=settings.patch,
        per_axis=settings.per_axis,
        model=settings.model,
        weights=settings.weights,
        dataset=settings.dataset,
        data_dir=settings.data_dir,
        split=settings.split,
    )
    for text in explorer.notices:
        console.print(f"[yellow]note:[/] {escape(text)}")
    if settings.host not in LOOPBACK:
        console.print(
            f"[yellow]warning:[/] listening on {escape(settings.host)}: whoever can reach this machine can use the "
            "page, without a password, and have their files decoded here"
        )
    with serve(explorer, host=settings.host, port=settings.port, open_browser=settings.open) as url:
        console.print(f"explore: {escape(url)} (Ctrl-C ends it)")
        wait_for_ctrl_c()
    return 0


def wait_for_ctrl_c() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
