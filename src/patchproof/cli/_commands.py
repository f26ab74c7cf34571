"""The commands, each with what it says of itself; what does the work is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from patchproof.cli._settings import (
    AttackSettings,
    BenchSettings,
    CertifySettings,
    DemoSettings,
    DoctorSettings,
    ExploreSettings,
    LsSettings,
    PredictSettings,
    ReportSettings,
    TrainSettings,
)

What = Literal["models", "datasets", "defenses", "strategies", "recipes", "runs"]


def demo(settings: DemoSettings) -> int:
    """Fine-tune a small network on random and on worst-case masks, and count what each can prove."""
    from patchproof.cli.demo import demo

    return demo(settings)


def train(settings: TrainSettings) -> int:
    """Fine-tune on masked copies, validate and save after each epoch; a killed run goes on with --resume."""
    from patchproof.cli._runs import train

    return train(settings)


def certify(settings: CertifySettings) -> int:
    """Count the images that provably keep their label under any patch, and write one record for each."""
    from patchproof.cli._runs import evaluate

    return evaluate("certify", settings)


def attack(settings: AttackSettings) -> int:
    """Certify images and attack them with patches: accuracy under attack beside the provable one."""
    from patchproof.cli._runs import evaluate

    return evaluate("attack", settings)


def predict(images: list[Path], settings: PredictSettings) -> int:
    """Answer image files, or all images below folders, through a defence, and say which answers are certified.

    Parameters
    ----------
    images
        Image files or folders; `-` is one image from standard input.
    """
    from patchproof.cli._runs import predict

    return predict(images, settings)


def report(runs: list[Path], settings: ReportSettings) -> int:
    """Show one run in depth or several side by side: an HTML page without network, SVG and PNG, tables.

    Parameters
    ----------
    runs
        Folders of `certify`, `attack` and `train` runs; they are read, not changed.
    """
    from patchproof.cli import pages

    return pages.report(runs, settings)


def explore(place: Path | None, settings: ExploreSettings) -> int:
    """Look at single images in the browser: their two-mask table, and what the defence does with a patch on them.

    Parameters
    ----------
    place
        Folder of a `certify`, `attack` or `train` run, or a checkpoint folder; default: the embedded demonstration
        network with the embedded images.
    """
    from patchproof.cli import pages

    return pages.explore(place, settings)


def bench(settings: BenchSettings) -> int:
    """Measure certification and prediction in one run: the bare network, a loop like the published one, and ours."""
    from patchproof.cli.bench import bench

    return bench(settings)


def ls(what: What | None, pattern: str | None, settings: LsSettings) -> int:
    """List models, data sets, defences, masking strategies, the paper's recipes, or the runs below a folder.

    Parameters
    ----------
    what
        What to list; default: runs.
    pattern
        For models and recipes a wildcard such as `vit*`, for runs the folder to look below (default: runs).
    """
    from patchproof.cli.ls import ls

    return ls(what or "runs", pattern or "", settings)


def doctor(settings: DoctorSettings) -> int:
    """Check the installation: versions, devices, embedded data, extras, and a certification done two ways."""
    from patchproof.cli.doctor import doctor

    return doctor(settings)


COMMANDS = (demo, train, certify, attack, predict, report, explore, bench, ls, doctor)
