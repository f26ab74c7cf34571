"""`patchproof predict`: the defended answer for images of your own, and what is proved about it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from patchproof.cli._setup import (
    Setup,
    checked,
    checked_images,
    choose_device,
    images_at_once,
    open_classifier,
    prepare,
)
from patchproof.cli._terminal import Console, visible
from patchproof.config import PredictConfig, parse_patches
from patchproof.data import EXTENSIONS, BadImageError, decode, preprocess
from patchproof.defenses import Assessment
from patchproof.masking import BLOCK, as_images
from patchproof.models import ImageClassifier, wordnet_words
from patchproof.types import InputError, PatchproofError, Size

DECODERS = 2
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
    views = Views(config, classifier)
    views.measure(files)
    answers: list[Answer] = []
    with Progress(console=status, disable=not status.is_terminal, transient=True) as bar:
        task = bar.add_task("predict", total=len(files))
        for found in answered(views, files):
            good = [answer for answer in found if isinstance(answer, Answer)]
            for complaint in (answer for answer in found if isinstance(answer, str)):
                status.print(complaint, soft_wrap=True)
            if config.json:
                write_lines(good)
            answers += good
            bar.advance(task, len(found))
    if not config.json:
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


class Views:
    """How an image of each size is looked at: it decides preprocessing, threat and masks, its company does not."""

    def __init__(self, config: PredictConfig, classifier: ImageClassifier) -> None:
        self.config, self.classifier = config, classifier
        self.engine: dict[str, Any] = {}
        self.known: dict[tuple[bool, Size | None], Setup] = {}
        self.lock = threading.Lock()

    def of(self, size: Size) -> Setup:
        kind = max(size) < SMALL, size if self.config.threat_space == "native" else None
        with self.lock:
            if kind not in self.known:
                setup = prepare(self.config, self.classifier, low_resolution=kind[0], native_sizes={size})
                self.known[kind] = setup.with_engine(**self.engine)
            return self.known[kind]

    def read(self, file: Path) -> tuple[Setup, torch.Tensor]:
        """The image at the network input, and how to look at it."""
        picture = decode(file)
        setup = self.of((picture.height, picture.width))
        return setup, preprocess(picture, setup.preprocessing)

    def measure(self, files: Sequence[Path]) -> None:
        """Check the classifier on the first images that can be read, and keep the τ found."""
        setup, pixels = None, []
        for file in files:
            with contextlib.suppress(PatchproofError):
                setup, image = self.read(file)
                pixels.append(image)
            if setup and len(pixels) == checked_images(setup.engine, setup.masks.image_size):
                break
        if setup:
            engine = checked(setup, torch.stack(pixels))[0].engine
            self.engine = {"chunk": engine.chunk, "tau": engine.tau, "tau_fp32": engine.tau_fp32}
            self.known.clear()


def answered(views: Views, files: Sequence[Path]) -> Iterator[list[Answer | str]]:
    """Answers in the order of the files, a batch at a time; a file that cannot be used gets a line that says why.

    The next batch is decoded while this one is looked at.
    """
    size = images_at_once(views.engine.get("chunk", BLOCK), choose_device(views.config.device))
    with ThreadPoolExecutor(DECODERS, thread_name_prefix="patchproof-decode") as pool:
        waiting: deque[tuple[Sequence[Path], list[Future[tuple[Setup, torch.Tensor]]]]] = deque()
        for start in range(0, len(files), size):
            batch = files[start : start + size]
            waiting.append((batch, [pool.submit(views.read, file) for file in batch]))
            if len(waiting) > 1:
                yield _answer_batch(views.classifier, *waiting.popleft())
        for batch, images in waiting:
            yield _answer_batch(views.classifier, batch, images)


def _answer_batch(
    classifier: ImageClassifier, files: Sequence[Path], images: Sequence[Future[tuple[Setup, torch.Tensor]]]
) -> list[Answer | str]:
    """One `assess` for all images that are looked at in the same way."""
    answers: dict[Path, Answer | str] = {}
    alike: dict[int, tuple[Setup, dict[Path, torch.Tensor]]] = {}
    for file, image in zip(files, images, strict=True):
        try:
            setup, pixels = image.result()
            alike.setdefault(id(setup), (setup, {}))[1][file] = pixels
        except (BadImageError, InputError) as error:
            reason = error.reason if isinstance(error, BadImageError) else str(error)
            answers[file] = f"[red]cannot use[/] {escape(printable(file))}: {escape(reason)}"
    for setup, group in alike.values():
        found = setup.defense.assess(as_images(torch.stack(list(group.values())), setup.device)).to("cpu")
        answers |= {file: _answer(classifier, found, row, file) for row, file in enumerate(group)}
    return [answers[file] for file in files]


def _answer(classifier: ImageClassifier, found: Assessment, row: int, file: Path) -> Answer:
    label, margin = int(found.predictions[row]), float(found.certificates.margin[row])
    return Answer(
        path=str(file),
        label=label,
        name=label_name(classifier, label),
        unanimous=bool(found.unanimous[row]),
        certified=bool(found.certificates.certified[row]),
        margin=round(margin, 6) if math.isfinite(margin) else None,
        forwards=int(found.certificates.forwards[row]),
    )


def printable(path: Path | str) -> str:
    """A path for people: line breaks, control characters and bytes that are no text shown as such."""
    return visible(str(path))


def label_name(classifier: ImageClassifier, label: int) -> str:
    """The class in words: its name, and for a WordNet id what that stands for."""
    if classifier.class_names is None:
        return f"class {label}"
    name = classifier.class_names[label]
    words = wordnet_words(name)
    return f"{words} ({name})" if words else name


def write_lines(answers: Sequence[Answer]) -> None:
    file = Console().file
    file.writelines(json.dumps(asdict(found), allow_nan=False) + "\n" for found in answers)
    file.flush()


def show(answers: Sequence[Answer], config: PredictConfig, classifier: ImageClassifier) -> None:
    console = Console()
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
