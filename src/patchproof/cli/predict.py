"""`patchproof predict`: the defended answer for images of your own, and what is proved about it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from patchproof.cli._setup import Setup, checked, open_classifier, prepare
from patchproof.config import PredictConfig
from patchproof.data import EXTENSIONS, BadImageError, decode, preprocess
from patchproof.masking import as_images
from patchproof.models import ImageClassifier
from patchproof.types import InputError, Size

PROMISE = (
    "Certified means: whatever one patch of at most {sizes} pixels is put anywhere on this very image, the answer "
    "stays the same. It does not say that the answer is right, nor that the image has not been patched already."
)


@dataclass(frozen=True)
class Answer:
    """What is known about one image file."""

    path: str
    label: int
    name: str
    unanimous: bool
    certified: bool
    margin: float
    forwards: int


def predict(images: list[Path], /, *, config: Annotated[PredictConfig, Parameter(name="*")] = PredictConfig()) -> int:
    """Answer image files, or all images below folders, through double masking, and say which answers are certified."""
    files = [file for path in images for file in image_files(path)]
    pictures, bad = read_all(files)
    status = Console(stderr=True)
    for error in bad:
        status.print(f"[red]cannot read[/] {escape(str(error))}", soft_wrap=True)
    if pictures:
        setup, answers = answer_all(config, pictures, status)
        show(answers, setup, as_json=config.json)
    return 1 if bad else 0


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


def read_all(files: Sequence[Path]) -> tuple[dict[Path, Image.Image], list[BadImageError]]:
    pictures, bad = {}, []
    for file in files:
        try:
            pictures[file] = decode(file)
        except BadImageError as error:
            bad.append(error)
    return pictures, bad


def answer_all(
    config: PredictConfig, pictures: dict[Path, Image.Image], console: Console
) -> tuple[Setup, list[Answer]]:
    classifier = open_classifier(config, num_classes=None, class_names=None)
    native: set[Size] = {(p.height, p.width) for p in pictures.values()}
    setup = prepare(config, classifier, low_resolution=is_small(native), native_sizes=native)
    pixels = torch.stack([preprocess(p, setup.preprocessing) for p in pictures.values()])
    setup, _ = checked(setup, pixels[:8])
    rows = zip(pictures, pixels, strict=True)
    shown = track(
        rows, "predict", total=len(pictures), console=console, disable=not console.is_terminal, transient=True
    )
    return setup, [answer(setup, path, image) for path, image in shown]


def is_small(sizes: set[Size]) -> bool:
    """All of them smaller than 64 pixels: enlarged whole, as the 32-pixel data sets are."""
    return all(max(size) < 64 for size in sizes)


def answer(setup: Setup, path: Path, pixels: torch.Tensor) -> Answer:
    found = setup.defense.assess(as_images(pixels[None], setup.device)).cpu()
    label = int(found.predictions)
    return Answer(
        path=str(path),
        label=label,
        name=label_name(setup.classifier, label),
        unanimous=bool(found.unanimous),
        certified=bool(found.certificates.certified),
        margin=round(float(found.certificates.margin), 6),
        forwards=int(found.certificates.forwards),
    )


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


def show(answers: Sequence[Answer], setup: Setup, *, as_json: bool) -> None:
    console = Console()
    if as_json:
        for found in answers:
            console.file.write(json.dumps(asdict(found)) + "\n")
        return
    table = Table(header_style="bold")
    for column in ("image", "answer", "first round", "certified", "margin", "passes"):
        table.add_column(column, justify="right" if column in ("margin", "passes") else "left", overflow="fold")
    for found in answers:
        certified = "[bold green]yes[/]" if found.certified else "no"
        first = "unanimous" if found.unanimous else "disagrees"
        row = (escape(found.path), escape(found.name), first, certified, f"{found.margin:.3f}", str(found.forwards))
        table.add_row(*row)
    console.print(table)
    sizes = " or ".join(f"{h}×{w}" for h, w in setup.threat.patch_sizes)
    console.print(PROMISE.format(sizes=sizes), style="dim")
