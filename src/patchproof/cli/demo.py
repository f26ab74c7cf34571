"""`patchproof demo`: the main job from beginning to end on embedded data, in minutes on a laptop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from patchproof.cli._setup import choose_device, choose_preprocessing
from patchproof.cli._show import results_table
from patchproof.cli.certify import Run
from patchproof.config import CertifyConfig, DemoConfig
from patchproof.data import ImageSource, iterate_batches, open_dataset
from patchproof.models import ImageClassifier, load_classifier, save_checkpoint
from patchproof.training import Schedule, fit, masking_strategy
from patchproof.types import InputError

STRATEGY = "cutout"
MASKS = (3, 6)


def demo(*, config: Annotated[DemoConfig, Parameter(name="*")] = DemoConfig()) -> int:
    """Train a small network on masked images, then count the images whose label no patch can change."""
    console = Console()
    folder = config.output or free_folder(Path("runs"), "demo")
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another --output")
    console.print("[bold]1. Train[/] a small network on 5,000 Fashion-MNIST images under two random masks each")
    classifier = train(config, console)
    checkpoint = folder / "checkpoint-last"
    save_checkpoint(classifier, checkpoint, extra={"strategy": STRATEGY, "epochs": config.epochs, "seed": config.seed})
    console.print("\n[bold]2. Certify[/] 1,000 test images against any 5×5 patch (3% of the image), anywhere")
    for masks in MASKS:
        console.print(results_table(certify(config, checkpoint, folder, masks), title=f"{masks}×{masks} masks"))
    console.print(f"everything is in {escape(str(folder))}: a checkpoint, and a run folder for each table")
    return 0


def free_folder(parent: Path, name: str) -> Path:
    """parent/name, or the first of name-2, name-3, … that does not exist."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(parent / candidate for candidate in names if not (parent / candidate).exists())


def train(config: DemoConfig, console: Console) -> ImageClassifier:
    source = open_dataset("fashion-mini", split="train")
    device = choose_device(config.device)
    classifier = load_classifier(
        "small", "random", num_classes=10, class_names=source.class_names, seed=config.seed
    ).to(device)
    pixels, labels = load_all(source, classifier)
    generator = torch.Generator().manual_seed(config.seed)
    strategy = masking_strategy(STRATEGY, image_size=classifier.input_size, generator=generator)
    schedule = Schedule(epochs=config.epochs, learning_rate=0.1, batch_size=64)
    reports = fit(classifier, pixels.to(device), labels.to(device), strategy, schedule=schedule, generator=generator)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("train", total=config.epochs)
        for report in reports:
            progress.update(task, advance=1, description=f"train, loss {report.loss:.3f}")
    console.print(f"   {config.epochs} epochs, last training loss {report.loss:.3f}")
    return classifier


def load_all(source: ImageSource, classifier: ImageClassifier) -> tuple[torch.Tensor, torch.Tensor]:
    preprocessing = choose_preprocessing(classifier, low_resolution=source.low_resolution)
    batches = list(iterate_batches(source, preprocessing, range(len(source)), batch_size=500))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def certify(config: DemoConfig, checkpoint: Path, folder: Path, masks: int) -> dict[str, Any]:
    output = folder / f"certify-{masks}x{masks}"
    settings = CertifyConfig(weights=str(checkpoint), masks=masks, output=output, device=config.device)
    return Run.begin(settings).execute(Console(stderr=True))
