"""`predict`: the defence's answers for any images, each with its certificate."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from patchproof.data import (
    EXTENSIONS,
    BadImageError,
    decode,
    files_below,
    note_unread,
    preprocess,
    reading,
    to_rgb,
    unit_floats,
)
from patchproof.defenses import (
    DEFENSES,
    Defense,
    MaskedDefense,
    assess,
    defense,
    device_of,
    require_defense,
    require_returned,
    with_engine,
)
from patchproof.geometry import PatchThreat, native_threat, parse_patches
from patchproof.masking import Audit, Measured, as_images, masks_for
from patchproof.models import weights_sha256, wordnet_words
from patchproof.runs._attack import as_judge
from patchproof.runs._certify import IMAGES_AT_ONCE
from patchproof.runs._manifest import plain, preprocessing_for, stored_taus
from patchproof.runs._measure import measure_on_generated
from patchproof.runs._reading import StoredCertification
from patchproof.types import CheckError, InputError, Preprocessing, Size, kind_of, printable, require_kinds

FIRST = 4
"""Images in the first batch; each later batch has twice as many, so that the first answers come soon."""

USABLE = "image file, PIL image or float tensor (c h w)"


@dataclass(frozen=True)
class Prediction:
    """The answer for one image; label −1 is an alarm.

    If `certified`, no patch of the threat on this very image changes the answer, except into an alarm (detection).
    """

    path: str
    label: int
    name: str
    certified: bool
    margin: float | None
    forwards: int
    remarks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unusable:
    """An image that cannot be answered, with the reason."""

    path: str
    reason: str


class Predictions(list[Prediction | Unusable]):
    """Answers in the order of the images."""

    misjudged: int = 0
    """Number of images that float32 answered, because a fast precision was further from it than its τ allows."""


DefenseFor = Defense | Callable[[Size], Defense]
"""A defence, or a function that returns the defence for images of a native size."""


def predict(
    defense: DefenseFor,
    images: Sequence[Path | str | Image.Image | Tensor],
    *,
    on_answer: Callable[[Prediction | Unusable], None] | None = None,
    preprocessing: Preprocessing | None = None,
) -> Predictions:
    """Answer and certify each image: files, PIL images, or float tensors (c h w) in [0, 1] of the input size.

    Answers come in the order of the images; an image that cannot be read gets an `Unusable`. Unless the engine is
    measured, τ is measured on generated images and never on those given, which may be hostile. An image that a fast
    precision misjudges is answered, and certified, in float32.
    """
    if isinstance(defense, Defense | nn.Module) or not callable(defense):
        require_defense(defense)
    if isinstance(images, (str, Path)) or not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise InputError(f"images must be a sequence, each an {USABLE}, not {kind_of(images)}; for one image, [image]")
    if isinstance(images, Tensor) and images.ndim == 3:
        raise InputError("images must be a sequence, not one image (c h w); for one image, [image]")
    require_kinds(predict, locals())
    known: dict[int, tuple[Any, Any]] = {}
    lock, given = threading.Lock(), preprocessing or getattr(defense, "preprocessing", None)

    def read(image: Path | str | Image.Image | Tensor) -> tuple[Any, Tensor]:
        """Decode an image; return the defence for its size and the input of the classifier."""
        pixels: Any
        with reading("image"):
            if isinstance(image, Tensor):
                pixels = unit_floats(image)
                size = pixels.shape[1], pixels.shape[2]
            else:
                pixels = to_rgb(image) if isinstance(image, Image.Image) else decode(image)
                size = pixels.height, pixels.width
        with lock:
            chosen: Any = defense if isinstance(defense, Defense) else defense(size)
            if id(chosen) not in known:
                ready = require_returned(chosen, "the function given as defense")
                if hasattr(chosen, "with_engine") and not isinstance(chosen.engine, Measured):
                    measured = measure_on_generated(chosen)
                    ready = chosen if measured is None else with_engine(chosen, measured[0])
                known[id(chosen)] = chosen, as_judge(ready)  # keeps `chosen` alive, since its id is the key
            ready = known[id(chosen)][1]
        small, input_size = is_small(size), ready.threat.image_size
        how = given or preprocessing_for(getattr(ready, "classifier", None), small, input_size)
        return ready, preprocess(pixels, how)

    most = getattr(defense, "images_at_once", IMAGES_AT_ONCE)
    start, size = 0, min(FIRST, most)
    answers = Predictions()
    before: list[tuple[str, Future[Any]]] = []
    with ThreadPoolExecutor(2, thread_name_prefix="patchproof-decode") as pool:
        while start < len(images) or before:
            batch = []
            for number, image in enumerate(images[start : start + size], start):
                if not isinstance(image, (Path, str, Image.Image, Tensor)):
                    raise InputError(f"image {number} is no {USABLE}, but {kind_of(image)}")
                name = image if isinstance(image, (Path, str)) else getattr(image, "filename", "") or f"{number:05d}"
                batch.append((str(name), pool.submit(read, image)))
            for answer in _answers(before, answers):
                answers.append(answer)
                if on_answer is not None:
                    on_answer(answer)
            start, size, before = start + size, min(2 * size, most), batch
    return answers


def is_small(size: Size) -> bool:
    """True if an image of this size is enlarged whole, like those of the 32-pixel data sets."""
    return max(size) < 64


def _answers(batch: Sequence[tuple[str, Future[Any]]], so_far: Predictions) -> Iterator[Prediction | Unusable]:
    """Answer a batch; images of one defence, kind and size are evaluated together."""
    answers: dict[int, Prediction | Unusable] = {}
    alike: dict[Any, tuple[Any, dict[int, Tensor]]] = {}
    for position, (path, image) in enumerate(batch):
        try:
            ready, pixels = image.result()
            alike.setdefault((id(ready), pixels.dtype, pixels.shape), (ready, {}))[1][position] = pixels
        except (BadImageError, InputError) as error:
            reason = error.reason if isinstance(error, BadImageError) else str(error)
            answers[position] = Unusable(path, reason)
    for ready, group in alike.values():
        images = as_images(torch.stack(list(group.values())), device_of(ready))
        audit = Audit()
        if hasattr(ready, "evaluator"):
            ready.evaluator.audit = audit
        found = assess(ready, images).to("cpu")
        wrong = torch.tensor(sorted(audit.exceeded), dtype=torch.int64)
        if len(wrong):  # the fast precision was off by more than its τ allows: repeat in float32
            engine = replace(ready.evaluator.measured, precision="fp32", compile=False, tau=0.0, tau_tf32=None)
            sure = assess(with_engine(ready, engine), images[wrong.to(images.device)]).to("cpu")
            found.predictions[wrong] = sure.predictions
            for name in ("certified", "margin", "forwards"):
                getattr(found.certificates, name)[wrong] = getattr(sure.certificates, name)
            for name, values in found.remarks.items():
                values[wrong] = sure.remarks[name]
            so_far.misjudged += len(wrong)
        proof, names = found.certificates, getattr(getattr(ready, "classifier", None), "class_names", None)
        for row, position in enumerate(group):
            label, margin = int(found.predictions[row]), float(proof.margin[row])
            name = str(names[label]) if names is not None and label < len(names) else f"class {label}"
            words = wordnet_words(name)
            if words:  # the name is a WordNet id
                name = f"{words} ({name})"
            answers[position] = Prediction(
                path=batch[position][0],
                label=label,
                name="alarm" if label < 0 else name,
                certified=bool(proof.certified[row]),
                margin=round(margin, 6) if math.isfinite(margin) else None,
                forwards=int(proof.forwards[row]),
                remarks={name: values[row].item() for name, values in found.remarks.items()},
            )
    for position in range(len(batch)):
        yield answers[position]


def image_files(path: Path) -> list[Path]:
    """Return the file itself, or all visible images below the folder in a fixed order, as `certify` lists them."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"no such image or folder: {path}")
    found = [path / name for name in files_below(path)]
    files = sorted((f for f in found if f.name.lower().endswith(EXTENSIONS)), key=os.fsencode)
    if not files:
        raise InputError(f"{path} holds no images ({', '.join(EXTENSIONS)})")
    note_unread((str(f) for f in found if not f.name.lower().endswith(EXTENSIONS)), str(path))
    return files


def stored_defense(run: StoredCertification, classifier: Any) -> Any:
    """Rebuild the defence of a certification, with its masks or options, precision and τ, on the same weights."""
    found, wanted = weights_sha256(classifier), run.weights_sha256
    if wanted is None or found != wanted:
        named = f", {printable(run.weights)}" if run.weights else ""
        named += " with mirror=True" if run.config.get("mirror") is True else ""
        if not run.config:  # a plain module has another digest than the same one in an ImageClassifier
            named += ", or, as that run was made from Python, predict there with its defence (pp.predict)"
        raise CheckError(
            f"these weights are not known to be those that {run.folder} certified (sha256 {str(found)[:12]}…, not "
            f"{str(wanted)[:12]}…); give the weights of that run{named}"
        )
    if run.fill is not None and tuple(run.fill) != tuple(getattr(classifier, "fill", run.fill)):
        raise CheckError(f"{run.folder} was certified with masked pixels of {run.fill}; this classifier has other ones")
    kind = DEFENSES[run.defense].kind if run.defense in DEFENSES else None
    if kind is None or run.image_size is None or (run.masks is None) == issubclass(kind, MaskedDefense):
        raise InputError(f"{run.folder} is about the defence `{run.defense}`, which has no name here; build your own")
    engine = Measured(precision=run.manifest["precision"], **stored_taus(run.manifest["tau"]))
    threat = PatchThreat(run.image_size, run.patch_sizes, run.patches)
    if run.masks is not None:
        return kind(classifier, run.masks, threat, engine=engine)
    options = {option: run.config[option] for option in kind.Options.__dataclass_fields__ if option in run.config}
    built = defense(run.defense, classifier, threat, engine=engine, **options)
    recorded = run.manifest["identity"]["defense"]
    for name, value in plain(built.describe(), "what describe() returns").items():
        if name not in ("precision", "compile") and recorded.get(name) != value:
            raise CheckError(
                f"{run.folder} is about `{run.defense}` with {name} {recorded.get(name)}, not {value}; a run made from "
                "Python does not record its options, so build the defence yourself"
            )
    return built


def defense_like(run: StoredCertification, classifier: Any) -> DefenseFor:
    """Rebuild the defence of a certification for images of any size.

    If the patch is measured on the original image, its footprint and the masks depend on the size of that image.
    """
    stored = stored_defense(run, classifier)
    if not run.native:
        return stored

    @cache
    def for_size(native: Size) -> Any:
        how = run.preprocessing or preprocessing_for(classifier, is_small(native), stored.threat.image_size)
        patches = parse_patches(str(run.config["patch"]), native)
        threat = native_threat(native_size=native, patch_sizes=patches, preprocessing=how, patches=run.patches)
        if run.masks is None:
            return replace(stored, threat=threat)
        return replace(stored, masks=masks_for(classifier, threat, per_axis=run.axes or 3), threat=threat)

    for_size.preprocessing = run.preprocessing  # type: ignore[attr-defined]  # the footprints hold only for it
    return for_size
