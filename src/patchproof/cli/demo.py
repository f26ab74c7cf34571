"""`patchproof demo`: the paper's story in miniature, on embedded data, in minutes on a laptop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from patchproof.cli._runs import certified, trained
from patchproof.cli._settings import CertifySettings, DemoSettings, TrainSettings, with_defense
from patchproof.cli._show import Console, RunBar, interval_text, new_table, percent, print_json
from patchproof.data import open_dataset
from patchproof.recipes import find_recipe
from patchproof.types import InputError

STRATEGIES = ("cutout", "greedy")
MASKS = (3, 6)
TITLE = "Random masks or worst-case masks: what can be proved?"


def demo(settings: DemoSettings) -> int:
    """Fine-tune a small network on random and on worst-case masks, and compare how many images each can certify."""
    from patchproof.report import Options, build_report

    status = Console(stderr=True)
    console = status if settings.json else Console()
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    folder = settings.output or next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
    if settings.epochs < 1 or settings.images < 1:
        raise InputError(f"--epochs and --images must be at least 1, not {settings.epochs} and {settings.images}")
    available = len(open_dataset("fashion-mini", split="test"))
    if settings.images > available:
        raise InputError(
            f"--images must be at most {available}, as many as there are to test on, not {settings.images}"
        )
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --output")
    console.print("[bold]1. Start:[/] a small network learns 5,000 Fashion-MNIST images as they are")
    fit(settings, folder, "plain", status)
    for number, strategy in enumerate(STRATEGIES, start=2):
        console.print(f"[bold]{number}. Fine-tune[/] it on masked copies: {strategy}")
        fit(settings, folder, strategy, status)
    console.print(
        f"[bold]4. Certify[/] {settings.images} test images against any 5×5 patch (3% of the image), anywhere"
    )
    found = {(s, m): certify(settings, folder, s, m, status) for s in STRATEGIES for m in MASKS}
    if settings.json:
        for (strategy, masks), run in found.items():
            print_json({"strategy": strategy, "masks": masks, "folder": str(run.folder), **run.content})
    numbers = "undefended", "defended", "certified", "95% interval", "passes"
    title = f"accuracy on {found['greedy', 3].certified.n} test images"
    table = new_table("training", "masks", *numbers, numbers=numbers, title=title)
    for (strategy, masks), run in found.items():
        clean = percent(run.undefended.rate), percent(run.defended.rate)
        proved = f"[bold green]{percent(run.certified.rate)}[/]", interval_text(run.certified)
        passes = f"{run.content['cost']['forwards_per_image']:.0f}"
        table.add_row(strategy, f"{masks}×{masks}", *clean, *proved, passes)
    console.print(table)
    console.plain(f"checkpoints, logs and one record per image: {folder}")
    runs = [*(folder / strategy for strategy in STRATEGIES), *(run.folder for run in found.values())]
    page = build_report(runs, Options(title=TITLE)).write(folder / "report")
    console.plain(f"report: {page}")
    return 0


def fit(settings: DemoSettings, folder: Path, name: str, console: Console) -> None:
    """Train a recipe: `plain`, the common start, or one that fine-tunes its network on masked copies."""
    recipe = find_recipe(f"fashion-small-{name}")
    changes: dict[str, Any] = {"seed": settings.seed, "device": settings.device, "output": folder / "start"}
    if recipe.start is not None:
        weights = str(folder / "start" / "checkpoint-last")
        changes |= {"weights": weights, "epochs": settings.epochs, "output": folder / name}
    trained(TrainSettings(**{**recipe.training, **changes}), console)


def certify(settings: DemoSettings, folder: Path, strategy: str, masks: int, console: Console) -> Any:
    chosen = with_defense(CertifySettings, "patchcleanser")(
        weights=str(folder / strategy / "checkpoint-last"),
        per_axis=masks,
        device=settings.device,
        limit=settings.images,
        output=folder / strategy / f"certify-{masks}x{masks}",
    )
    return certified(chosen, RunBar(console, "certify"))
