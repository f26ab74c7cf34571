"""`patchproof predict`: the defended answer for images of your own, and what is proved about it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from patchproof.cli._setup import CHECKED_IMAGES, Setup, checked, open_classifier, prepare
from patchproof.config import PredictConfig, parse_patches
from patchproof.data import EXTENSIONS, BadImageError, decode, preprocess
from patchproof.masking import Engine, as_images
from patchproof.models import ImageClassifier
from patchproof.types import InputError, PatchproofError

SMALL = 64
"""An image smaller than this on both sides is enlarged whole, as the 32-pixel data sets are."""

PROMISE = (
    "Certified means: whatever one patch of at most {patch} is put anywhere on this very image, the answer stays the "
    "same. It does not say that the answer is right, nor that the image has not been patched already."
)


@dataclass(frozen=True)
class Answer:
    """What is known about one image file."""

    path: str
    label: int
    name: str
    unanimous: bool
    certified: bool
    margin: float | None
    forwards: int


def predict(images: list[Path], /, *, config: Annotated[PredictConfig, Parameter(name="*")] = PredictConfig()) -> int:
    """Answer image files, or all images below folders, through double masking, and say which answers are certified."""
    files = [file for path in images for file in image_files(path)]
    status = Console(stderr=True)
    classifier = open_classifier(config, num_classes=None, class_names=None)
    engine = measure(config, classifier, files)
    shown = track(files, "predict", console=status, disable=not status.is_terminal, transient=True)
    answers = [found for found in (answer(config, classifier, engine, file, status) for file in shown) if found]
    show(answers, config, classifier)
    return 0 if len(answers) == len(files) else 1


def image_files(path: Path) -> Iterator[Path]:
    """The file itself, or every image below the folder in a fixed order."""
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise InputError(f"no such image or folder: {path}")
    found = [Path(root) / name for root, _, names in os.walk(path) for name in names]
    files = sorted((f for f in found if f.name.lower().endswith(EXTENSIONS)), key=os.fsencode)
    if not files:
        raise InputError(f"{path} holds no images ({', '.join(EXTENSIONS)})")
    yield from files


def read(config: PredictConfig, classifier: ImageClassifier, file: Path) -> tuple[Setup, torch.Tensor]:
    """The image at the network input, and the setup for an image of its size: its company plays no part."""
    picture = decode(file)
    size = picture.height, picture.width
    setup = prepare(config, classifier, low_resolution=max(size) < SMALL, native_sizes={size})
    return setup, preprocess(picture, setup.preprocessing)


def measure(config: PredictConfig, classifier: ImageClassifier, files: Sequence[Path]) -> Engine | None:
    """τ on the first few images that can be read; None if there are none."""
    setup, pixels = None, []
    for file in files:
        with contextlib.suppress(PatchproofError):
            setup, image = read(config, classifier, file)
            pixels.append(image)
        if len(pixels) == CHECKED_IMAGES:
            break
    return checked(setup, torch.stack(pixels))[0].engine if setup else None


def answer(
    config: PredictConfig, classifier: ImageClassifier, engine: Engine | None, file: Path, console: Console
) -> Answer | None:
    """The answer for one file; None, and a line that names it, if it cannot be used."""
    try:
        setup, pixels = read(config, classifier, file)
    except (BadImageError, InputError) as error:
        reason = error.reason if isinstance(error, BadImageError) else str(error)
        console.print(f"[red]cannot use[/] {escape(printable(file))}: {escape(reason)}", soft_wrap=True)
        return None
    defense = replace(setup, engine=engine or setup.engine).defense
    found = defense.assess(as_images(pixels[None], setup.device)).cpu()
    label, margin = int(found.predictions), float(found.certificates.margin)
    return Answer(
        path=str(file),
        label=label,
        name=label_name(classifier, label),
        unanimous=bool(found.unanimous),
        certified=bool(found.certificates.certified),
        margin=round(margin, 6) if math.isfinite(margin) else None,
        forwards=int(found.certificates.forwards),
    )


def printable(path: Path | str) -> str:
    """A path for people: bytes that are no text shown as such."""
    return os.fsencode(path).decode("utf-8", "replace")


def label_name(classifier: ImageClassifier, label: int) -> str:
    """The class in words: its name, and for a WordNet id what that stands for."""
    if classifier.class_names is None:
        return f"class {label}"
    name = classifier.class_names[label]
    words = _wordnet_words(name)
    return f"{words} ({name})" if words else name


def _wordnet_words(name: str) -> str | None:
    if not (len(name) == 9 and name.startswith("n") and name[1:].isdigit()):
        return None
    from timm.data.imagenet_info import ImageNetInfo

    words = ImageNetInfo().label_name_to_description(name, detailed=False)
    return words.split(",")[0] if words else None


def show(answers: Sequence[Answer], config: PredictConfig, classifier: ImageClassifier) -> None:
    console = Console()
    if config.json:
        for found in answers:
            console.file.write(json.dumps(asdict(found), allow_nan=False) + "\n")
        return
    if not answers:
        return
    table = Table(header_style="bold")
    for column in ("image", "answer", "first round", "certified", "margin", "passes"):
        table.add_column(column, justify="right" if column in ("margin", "passes") else "left", overflow="fold")
    for found in answers:
        certified = "[bold green]yes[/]" if found.certified else "no"
        first = "unanimous" if found.unanimous else "disagrees"
        margin = "–" if found.margin is None else f"{found.margin:.3f}"
        table.add_row(escape(printable(found.path)), escape(found.name), first, certified, margin, str(found.forwards))
    console.print(table)
    console.print(PROMISE.format(patch=patch_in_words(config, classifier)), style="dim")


def patch_in_words(config: PredictConfig, classifier: ImageClassifier) -> str:
    """The patch as it was asked for, and on what it is measured."""
    if config.threat_space == "native":
        return f"{config.patch} (of the original image)"
    height, width = classifier.input_size
    sizes = " or ".join(f"{h}×{w}" for h, w in parse_patches(config.patch, classifier.input_size))
    return f"{sizes} pixels (of the {height}×{width} network input that this image is resized to)"
