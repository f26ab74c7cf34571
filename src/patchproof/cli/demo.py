"""`patchproof demo`: the paper's story in miniature, on embedded data, in minutes on a laptop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from patchproof.cli._runs import certified, trained
from patchproof.cli._settings import CertifySettings, DemoSettings, TrainSettings, with_defense
from patchproof.cli._show import Console, RunBar, interval_text, percent, showing
from patchproof.types import InputError

STRATEGIES = ("cutout", "greedy")
MASKS = (3, 6)
START_EPOCHS = 2
TRAINING_IMAGES = 5000
TITLE = "Random masks or worst-case masks: what can be proved?"


def demo(settings: DemoSettings) -> int:
    """Fine-tune a small network on random and on worst-case masks, and count what each can prove."""
    console, status = Console(), Console(stderr=True)
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    folder = settings.output or next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
    if settings.epochs < 1 or settings.images < 1:
        raise InputError(f"--epochs and --images must be at least 1, not {settings.epochs} and {settings.images}")
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --output")
    console.print("[bold]1. Start:[/] a small network learns 5,000 Fashion-MNIST images as they are")
    fit(settings, folder / "start", "none", status, epochs=START_EPOCHS, learning_rate=0.1)
    for number, strategy in enumerate(STRATEGIES, start=2):
        console.print(f"[bold]{number}. Fine-tune[/] it on masked copies: {strategy}")
        fit(settings, folder / strategy, strategy, status, epochs=settings.epochs, start=folder / "start")
    console.print(
        f"[bold]4. Certify[/] {settings.images} test images against any 5×5 patch (3% of the image), anywhere"
    )
    results = {(s, m): certify(settings, folder, s, m, status) for s in STRATEGIES for m in MASKS}
    console.print(comparison(results))
    console.print(f"checkpoints, logs and one record per image: {escape(str(folder))}", soft_wrap=True)
    console.print(f"[bold]report:[/] {escape(str(write_report(folder)))}", soft_wrap=True, highlight=False)
    return 0


def fit(
    settings: DemoSettings,
    output: Path,
    strategy: str,
    console: Console,
    *,
    epochs: int,
    learning_rate: float = 0.05,
    start: Path | None = None,
) -> None:
    chosen = TrainSettings(
        model="small",
        weights=str(start / "checkpoint-last") if start else "random",
        strategy=strategy,
        limit=TRAINING_IMAGES,
        epochs=epochs,
        learning_rate=learning_rate,
        schedule="cosine",
        warmup_epochs=0.5,
        weight_decay=5e-4,
        validation_images=200,
        seed=settings.seed,
        device=settings.device,
        output=output,
    )
    trained(chosen, console)


def certify(settings: DemoSettings, folder: Path, strategy: str, masks: int, console: Console) -> Any:
    chosen = with_defense(CertifySettings, "patchcleanser")(
        weights=str(folder / strategy / "checkpoint-last"),
        per_axis=masks,
        device=settings.device,
        limit=settings.images,
        output=folder / strategy / f"certify-{masks}x{masks}",
    )
    bar = RunBar(console, "certify")
    with showing(bar):
        return certified("certify", chosen, bar)[0]


def write_report(folder: Path) -> Path:
    """Both trainings and the four certifications side by side; the path of the page."""
    from patchproof.report import Options, build_report

    trainings = [folder / strategy for strategy in STRATEGIES]
    certifications = [folder / s / f"certify-{m}x{m}" for s in STRATEGIES for m in MASKS]
    return build_report([*trainings, *certifications], Options(title=TITLE)).write(folder / "report")


def comparison(results: Mapping[tuple[str, int], Any]) -> Table:
    """One row per strategy and mask set; certified accuracy with its interval."""
    n = next(iter(results.values())).certified.n
    table = Table(title=f"accuracy on {n} test images", title_justify="left", header_style="bold")
    for column in ("training", "masks", "undefended", "defended", "certified", "95% interval", "passes"):
        table.add_column(column, justify="left" if column in ("training", "masks") else "right", no_wrap=True)
    for (strategy, masks), found in results.items():
        table.add_row(
            strategy,
            f"{masks}×{masks}",
            percent(found.undefended.rate),
            percent(found.defended.rate),
            f"[bold green]{percent(found.certified.rate)}[/]",
            interval_text(found.certified),
            f"{found.content['cost']['forwards_per_image']:.0f}",
        )
    return table
