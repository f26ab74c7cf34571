"""`patchproof demo`: the paper's story in miniature, on embedded data, in minutes on a laptop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from patchproof.cli._show import interval_text, percent
from patchproof.cli._terminal import Console
from patchproof.cli.certify import Run
from patchproof.cli.train import TrainRun
from patchproof.config import CertifyConfig, DemoConfig, TrainConfig
from patchproof.records import Rate
from patchproof.types import InputError

STRATEGIES = ("cutout", "greedy")
MASKS = (3, 6)
START_EPOCHS = 2
TRAINING_IMAGES = 5000
TITLE = "Random masks or worst-case masks: what can be proved?"


def demo(*, config: Annotated[DemoConfig, Parameter(name="*")] = DemoConfig()) -> int:
    """Fine-tune a small network on random and on worst-case masks, and count what each can prove."""
    console, status = Console(), Console(stderr=True)
    folder = config.output or free_folder(Path("runs"), "demo")
    if config.epochs < 1 or config.images < 1:
        raise InputError(f"--epochs and --images must be at least 1, not {config.epochs} and {config.images}")
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --output")
    console.print("[bold]1. Start:[/] a small network learns 5,000 Fashion-MNIST images as they are")
    fit(config, folder / "start", "none", status, epochs=START_EPOCHS, learning_rate=0.1)
    for number, strategy in enumerate(STRATEGIES, start=2):
        console.print(f"[bold]{number}. Fine-tune[/] it on masked copies: {strategy}")
        fit(config, folder / strategy, strategy, status, epochs=config.epochs, start=folder / "start")
    console.print(f"[bold]4. Certify[/] {config.images} test images against any 5×5 patch (3% of the image), anywhere")
    results = {(s, m): certify(config, folder, s, m, status) for s in STRATEGIES for m in MASKS}
    console.print(comparison(results))
    console.print(f"checkpoints, logs and one record an image: {escape(str(folder))}", soft_wrap=True)
    console.print(f"[bold]report:[/] {escape(str(write_report(folder)))}", soft_wrap=True, highlight=False)
    return 0


def free_folder(parent: Path, name: str) -> Path:
    """parent/name, or the first of name-2, name-3, … that does not exist."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(parent / candidate for candidate in names if not (parent / candidate).exists())


def fit(
    config: DemoConfig,
    output: Path,
    strategy: str,
    console: Console,
    *,
    epochs: int,
    learning_rate: float = 0.05,
    start: Path | None = None,
) -> None:
    settings = TrainConfig(
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
        seed=config.seed,
        device=config.device,
        output=output,
    )
    TrainRun.begin(settings).execute(console)


def certify(config: DemoConfig, folder: Path, strategy: str, masks: int, console: Console) -> dict[str, Any]:
    settings = CertifyConfig(
        weights=str(folder / strategy / "checkpoint-last"),
        masks=masks,
        device=config.device,
        limit=config.images,
        output=folder / strategy / f"certify-{masks}x{masks}",
    )
    return Run.begin(settings).execute(console)


def write_report(folder: Path) -> Path:
    """Both trainings and the four certifications side by side; the path of the page."""
    from patchproof.report import Options, build_report

    trained = [folder / strategy for strategy in STRATEGIES]
    certified = [folder / s / f"certify-{m}x{m}" for s in STRATEGIES for m in MASKS]
    return build_report([*trained, *certified], Options(title=TITLE)).write(folder / "report")


def comparison(results: Mapping[tuple[str, int], Mapping[str, Any]]) -> Table:
    """One row a strategy and mask set; certified accuracy with its interval."""
    n = next(iter(results.values()))["certified"]["n"]
    table = Table(title=f"accuracy on {n} test images", title_justify="left", header_style="bold")
    for column in ("training", "masks", "undefended", "defended", "certified", "95% interval", "passes"):
        table.add_column(column, justify="left" if column in ("training", "masks") else "right", no_wrap=True)
    for (strategy, masks), found in results.items():
        rate = Rate(found["certified"]["k"], found["certified"]["n"])
        table.add_row(
            strategy,
            f"{masks}×{masks}",
            percent(found["undefended"]["rate"]),
            percent(found["defended"]["rate"]),
            f"[bold green]{percent(rate.rate)}[/]",
            interval_text(rate),
            f"{found['cost']['forwards_per_image']:.0f}",
        )
    return table
