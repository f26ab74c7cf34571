"""Stored runs, read without changing their folders, for reports, the explorer and listings.

A damaged manifest is an error, because it alone says what was measured. Every number comes from records.jsonl or
log.jsonl; results.json gives the time, and is compared with the records.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from patchproof.data import ImageSource, open_dataset
from patchproof.geometry import MaskSet, Rect, Rects, footprint_words, size_words, whole_size
from patchproof.machine import BEGIN_AGAIN, being_written, require_run
from patchproof.models import wordnet_words
from patchproof.runs._folder import UNREADABLE, read_json, read_lines, read_manifest, read_results
from patchproof.runs._manifest import SCHEMA
from patchproof.runs._record import ACCURACIES, ATTACK_ACCURACIES, Rate, Record, Tally, rates
from patchproof.types import (
    CheckError,
    InputError,
    PatchproofError,
    Preprocessing,
    Size,
    count_words,
    printable,
    require_one_of,
    shortened,
    shortened_name,
)

CHECKPOINTS = ("checkpoint-best", "checkpoint-last")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    name: str
    folder: Path
    manifest: Mapping[str, Any]
    about: str
    """Network, its weights and the images, e.g. `small (runs/plain/checkpoint-last) on fashion-mini (test)`."""
    weights_sha256: str | None
    seconds: float | None
    notices: tuple[str, ...]
    """Doubts that belong next to the run's numbers."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the command line; empty for a run made from Python."""
        return self.manifest.get("config") or {}


@dataclass(frozen=True, kw_only=True)
class StoredCertification(_Stored):
    """A run of `certify` or `attack`: at most one record per image, and the settings."""

    records: tuple[Record, ...]
    class_names: Mapping[int, str]
    dataset: str
    architecture: str
    weights: str | None
    defense: str
    guarantee: str
    image_size: Size | None
    patch_sizes: tuple[Size, ...]
    patches: int
    native: bool
    masks: MaskSet | None
    preprocessing: Preprocessing | None
    fill: tuple[float, ...] | None
    planned: int
    available: int
    data_sha256: str | None
    precision: str
    device: str
    tau: float | None
    exhaustive: bool

    @cached_property
    def good(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error is None)

    @cached_property
    def rates(self) -> dict[str, Rate]:
        """The three accuracies; `undefended` is missing if the defence has no classifier of its own."""
        return {name: rate for name, rate in rates(self.good).items() if rate.n or not self.good}

    @cached_property
    def attacks(self) -> tuple[Record, ...]:
        """Records with the findings of attacks; none in a run of `certify`."""
        return tuple(record for record in self.good if record.attack is not None)

    @property
    def axes(self) -> Size | None:
        """Masks per axis, vertical and horizontal; None if the masks form no grid."""
        try:
            return None if self.masks is None else (len(self.masks.axes[0]), len(self.masks.axes[1]))
        except InputError:
            return None

    @property
    def masks_words(self) -> str:
        return "no masks" if self.masks is None else self.masks.words

    @property
    def patch_percent(self) -> float | None:
        """Area of the largest patch, in percent of the network input."""
        if self.image_size is None or not self.patch_sizes:
            return None
        return 100 * max(h * w for h, w in self.patch_sizes) / (self.image_size[0] * self.image_size[1])

    @property
    def threat(self) -> tuple[object, ...]:
        """Number of patches, threat space and patch sizes, for comparing runs with inputs of different resolution.

        Sizes are shares of the input's height and width; native ones are as they were asked for on the original image.
        """
        if self.native:
            return self.patches, self.native, self.config.get("patch")
        height, width = self.image_size or (1, 1)
        return self.patches, self.native, frozenset((h / height, w / width) for h, w in self.patch_sizes)

    @property
    def patch_words(self) -> str:
        if self.patch_percent is None:
            return "unknown size"
        native = f", footprint of {printable(str(self.config.get('patch')))} native" if self.native else ""
        two = "" if self.patches == 1 else "two patches of "
        sizes = (footprint_words if self.native else size_words)(*self.patch_sizes)
        return f"{two}{sizes} px ({self.patch_percent:.1f}%){native}"

    def class_name(self, label: int) -> str:
        return "alarm" if label < 0 else self.class_names.get(label, f"class {label}")


@dataclass(frozen=True)
class StoredEpoch:
    """Validation after one epoch of training."""

    epoch: int
    step: int
    undefended: Rate
    certified: Rate
    one_class: bool = False
    """True if the network nearly always answers one class; earlier runs did not record this."""


@dataclass(frozen=True, kw_only=True)
class StoredTraining(_Stored):
    """A run of `train`: one loss per step, validation accuracies per epoch, and the digest of the final weights."""

    losses: tuple[tuple[int, float], ...]
    epochs: tuple[StoredEpoch, ...]
    strategy: str
    search_passes: int | None
    """Extra passes per image for the strategy's search, forward and backward, as the paper counts them."""
    mask_patch: str
    selected_on: str | None
    """Images on which the best epoch is chosen, in words; None if the run does not say."""
    chosen: int | None = None
    """The epoch in `checkpoint-best`, if results.json names it."""

    @property
    def best(self) -> StoredEpoch | None:
        """The epoch in `checkpoint-best`: highest certified, then undefended accuracy; the first of equals.

        One after which the network answers one class is best only if there is no other. Earlier versions chose it all
        the same, so the epoch that results.json names comes first.
        """
        for epoch in self.epochs:
            if epoch.epoch == self.chosen:
                return epoch
        return max(self.epochs, key=lambda e: (not e.one_class, e.certified.k, e.undefended.k, -e.epoch), default=None)


StoredRun = StoredCertification | StoredTraining


def read_runs(folders: Sequence[Path | str]) -> tuple[list[StoredCertification], list[StoredTraining]]:
    """Read each folder once, in order; name it by the shortest end of its path that no other folder shares."""
    unique: dict[Path, Path | str] = {}
    for folder in folders:
        unique.setdefault(Path(os.path.realpath(folder)), folder)  # Path.resolve fails on links that form a loop
    ends = Counter(path.parts[-count:] for path in unique for count in range(1, len(path.parts) + 1))
    found = []
    for path, folder in unique.items():
        lengths = range(1, len(path.parts))
        short = next((path.parts[-n:] for n in lengths if ends[path.parts[-n:]] == 1), path.parts)
        found.append(read_run(folder, printable("/".join(short))))
    return [r for r in found if isinstance(r, StoredCertification)], [r for r in found if isinstance(r, StoredTraining)]


def read_run(folder: Path | str, name: str | None = None) -> StoredRun:
    """Read the run in this folder; InputError if there is none, CheckError if it cannot be trusted."""
    require_run(folder)
    folder = Path(folder)
    path = folder / "manifest.json"
    manifest = read_manifest(path)
    command = manifest["command"]
    if manifest.get("schema") != SCHEMA:
        found = printable(str(manifest.get("schema")))
        raise CheckError(f"{path} has schema {found}, this version reads {SCHEMA}; make the run again with it")
    if (folder / "spoiled.json").exists():
        reason = printable(str(read_json(folder / "spoiled.json").get("reason")))
        raise CheckError(f"{folder} cannot be trusted: {reason}; make a new run")
    if command not in ("certify", "attack", "train"):
        raise InputError(f"{folder} holds a `{printable(command)}` run, not one of certify, attack or train")
    name = name or printable(Path(os.path.realpath(folder)).name)
    try:
        return (_training if command == "train" else _certification)(folder, name, manifest)
    except UNREADABLE as error:
        raise CheckError(f"{path} is damaged ({printable(repr(error))}); {BEGIN_AGAIN}") from error


def _certification(folder: Path, name: str, manifest: dict[str, Any]) -> StoredCertification:
    identity, data = manifest["identity"], manifest["data"]
    model, config = manifest.get("model") or {}, manifest.get("config") or {}
    # Old manifests name no defence, because there was only one.
    defense = identity.get("defense") or {"name": "patchcleanser", "guarantee": "recovery", **identity}
    drawn = manifest.get("masks")
    masks = drawn and MaskSet(whole_size(drawn["image_size"]), tuple(map(_mask, drawn["rects"])))
    size: Any = defense.get("image_size") or (masks and masks.image_size)
    images = re.fullmatch(r"(\d{1,12}) of (\d{1,12})", identity["images"])
    if images is None:
        raise ValueError(f"images: {identity['images']!r}")
    planned, available = map(int, images.groups())
    guarantee = manifest.get("guarantee") or defense["guarantee"]
    require_one_of("guarantee", guarantee, ("recovery", "detection"))
    read, notices, damaged = _lines(folder / "records.jsonl", Record.parse, folder / "records.crc")
    first: dict[int, Record] = {}
    for record in read:
        first.setdefault(record.index, record)  # a repeated image counts once
    results = read_results(folder)
    fill, tau = model.get("fill") or model.get("mean"), (manifest.get("tau") or {}).get("fp32")
    how: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in (identity.get("preprocessing") or {}).items()
    }
    # Labels are outputs of the classifier. If those have no names, the data set's names are used if there are as many.
    classes = data["class_names"] if model.get("classes") in (None, len(data["class_names"])) else ()
    architecture = identity.get("architecture") or "no classifier"
    run = StoredCertification(
        name=name,
        folder=folder,
        manifest=manifest,
        about=_about(manifest, architecture, data),
        records=tuple(first.values()),
        class_names=class_words(dict(enumerate(model.get("class_names") or classes))),
        seconds=_seconds((results or {}).get("cost")),
        notices=(),
        dataset=printable(data["name"]),
        architecture=printable(architecture),
        weights=_text(config.get("weights")),
        defense=printable(defense.get("name") or "unnamed"),
        guarantee=guarantee,
        image_size=None if size is None else whole_size(size),
        patch_sizes=tuple(map(whole_size, defense.get("patch_sizes") or ())),
        patches=2 if defense.get("patches") == 2 else 1,
        native=config.get("threat_space") == "native",
        masks=masks,
        preprocessing=Preprocessing(**how) if how else None,
        fill=None if fill is None else tuple(map(float, fill)),
        planned=planned,
        available=available,
        data_sha256=_text(identity.get("data_sha256")),
        weights_sha256=_text(identity.get("weights_sha256")),
        precision=printable(manifest.get("precision") or "fp32"),
        device=printable(manifest["device"]),
        tau=None if tau is None else float(tau),
        exhaustive=defense.get("exhaustive") is True,
    )
    return replace(run, notices=(*notices, *_notices(run, results, len(read) - len(first), damaged)))


def _notices(
    run: StoredCertification, results: Mapping[str, Any] | None, repeated: int, damaged: Sequence[int]
) -> Iterator[str]:
    """Remarks on the network, odd records, why they do not cover the data set, and contradictions with results.json."""
    yield from map(printable, run.manifest.get("remarks") or ())
    if repeated:
        yield f"{count_words(repeated, 'record repeats', 'records repeat')} an image; the first of each counts"
    strangers = sum(not is_planned(record.index, run.planned, run.available) for record in run.records)
    if strangers:
        words = count_words(strangers, "record is about an image", "records are about images")
        yield f"{words} that the manifest did not plan; they are counted"
    unproved = sum(bool(record.certified) and not record.defended for record in run.records)
    if unproved and run.guarantee == "recovery":
        words = count_words(unproved, "image is", "images are")
        yield f"{words} recorded as certified but answered wrong, which a certificate rules out"
    if run.planned < run.available:
        yield f"partial: {run.planned:,} of {run.available:,} images were asked for"
    if damaged:
        yield (
            f"partial: {len(run.records):,} of {run.planned:,} images are counted, without those of damaged lines, "
            f"which may be just the failures; remove line {damaged[0]} of records.jsonl and all lines after it, then "
            "resume the run"
        )
    elif len(run.records) < run.planned:
        yield f"partial: {len(run.records):,} of {run.planned:,} images are done; {_goes_on(run.folder)}"
    bad = len(run.records) - len(run.good)
    if bad:
        yield f"partial: {count_words(bad, 'bad image was', 'bad images were')} skipped"
    if not run.records:
        yield "there is no record yet, so there is nothing to count"
    if results is None:
        if len(run.records) >= run.planned:  # otherwise it has not been written yet
            yield (
                "results.json is missing or damaged; the accuracies are counted from the records, the time is not known"
            )
        return
    attacked = len(run.attacks) == len(run.good)
    names = [name for name in ATTACK_ACCURACIES if name in ACCURACIES or (attacked and name in results)]
    wrong = []
    for name, rate in Tally(names).add(run.records).rates().items():
        said: Any = results.get(name)
        k, n = (said.get("k"), said.get("n")) if isinstance(said, Mapping) else (0, 0)
        if (k, n) != (rate.k, rate.n):
            wrong.append(printable(f"{name} {k} of {n}, the records {rate.k} of {rate.n}"))
    if wrong:
        yield f"results.json contradicts the records, which count: it says {'; '.join(wrong)}"


def is_planned(image: int, planned: int, available: int) -> bool:
    """True if the image is in `evenly_spread(planned, available)`, which may be too long to build."""
    position = -(-image * planned // available) if image < available else planned
    return position < planned and position * available // planned == image


def _training(folder: Path, name: str, manifest: dict[str, Any]) -> StoredTraining:
    found, notices, _ = _lines(folder / "log.jsonl", _log_line)
    losses = dict(value for value in found if not isinstance(value, StoredEpoch))
    epochs = {value.epoch: value for value in found if isinstance(value, StoredEpoch)}
    results, done, total = read_results(folder), max(losses, default=0), manifest.get("steps")
    for said in (results or {}).get("epochs") or ():
        logged = epochs.get(index(said["epoch"]))
        if logged is not None and logged != _epoch(said):
            notices.append(f"results.json and log.jsonl contradict each other about epoch {logged.epoch}")
    if isinstance(total, int) and done < total:
        notices.append(f"partial: {done:,} of {total:,} steps are done; {_goes_on(folder)}")
    elif results is None:
        notices.append("results.json is missing or damaged: training was stopped, or the file was lost")
    if len(losses) < done:
        lost = count_words(done - len(losses), "step is", "steps are")
        notices.append(f"{lost} missing in log.jsonl; the weights do not depend on it")
    identity, best = manifest["identity"], (results or {}).get("best")
    data = manifest.get("data") or {}
    validation, learned_from = data.get("validation"), data.get("train") or {"name": "unknown images"}
    selected_on = None if validation is None else printable(f"{validation['name']}, split {validation['split']}")
    notices += [printable(str(remark)) for remark in manifest.get("remarks") or ()]
    passes: list[Any] = [(manifest.get("search") or {}).get(kind) for kind in ("forwards", "backwards")]
    return StoredTraining(
        name=name,
        folder=folder,
        manifest=manifest,
        about=_about(manifest, (manifest.get("model") or {}).get("architecture") or "unknown network", learned_from),
        losses=tuple(sorted(losses.items())),
        epochs=tuple(epochs[number] for number in sorted(epochs)),
        strategy=printable(identity["plan"]["strategy"]),
        search_passes=sum(passes) if all(isinstance(count, int) for count in passes) else None,
        mask_patch=str(identity.get("mask_patch") or identity["plan"].get("mask_patch")),
        selected_on=selected_on,
        chosen=best.get("epoch") if isinstance(best, Mapping) else None,
        weights_sha256=_text((results or {}).get("weights_sha256")),
        seconds=_seconds(results),
        notices=tuple(notices),
    )


def _about(manifest: Mapping[str, Any], architecture: str, data: Mapping[str, Any]) -> str:
    weights, split = (manifest.get("config") or {}).get("weights"), data.get("split")
    network = f"{architecture} ({shortened_name(str(weights), 40)})" if weights else architecture
    return printable(f"{network} on {data['name']}{f' ({split})' if split else ''}")


def _goes_on(folder: Path) -> str:
    return "it is running" if being_written(folder) else "resume the run to finish it"


def _log_line(line: str) -> StoredEpoch | tuple[int, float]:
    values = json.loads(line)
    if values["kind"] == "step":
        return int(values["step"]), float(values["loss"])
    if values["kind"] != "epoch":
        raise ValueError(f"unknown kind {values['kind']!r}")
    return _epoch(values)


def _epoch(values: Mapping[str, Any]) -> StoredEpoch:
    found = {name: Rate(index(values[name]["k"]), index(values[name]["n"])) for name in ("undefended", "certified")}
    if not all(0 <= rate.k <= rate.n for rate in found.values()):
        raise ValueError("not k of n")
    one_class = values.get("one_class") is True
    return StoredEpoch(index(values["epoch"]), index(values["step"]), **found, one_class=one_class)


def _lines(path: Path, parse: Callable[[str], Any], sums: Path | None = None) -> tuple[list[Any], list[str], list[int]]:
    """Parse the sound lines of a JSONL file, plain or packed (.xz).

    Return their values, notices about the other lines, and the numbers of those that are damaged.
    """
    packed = path.with_name(f"{path.name}.xz")
    try:
        content = path.read_bytes() if path.exists() or not packed.exists() else lzma.decompress(packed.read_bytes())
        *lines, cut = content.split(b"\n")
    except (OSError, lzma.LZMAError):
        return [], [f"{path.name} is missing or cannot be read"], []
    known = sums.read_text("ascii", errors="replace").split("\n")[:-1] if sums and sums.is_file() else []
    values, damaged = read_lines(lines, parse, known)
    notices = [f"the last line of {path.name} is cut short and left out"] if cut else []
    if damaged:
        which = shortened(", ".join(map(str, damaged)), 60)
        notices.append(f"damaged: {count_words(len(damaged), 'line', 'lines')} of {path.name}, left out: {which}")
    # Older runs have neither a progress.jsonl nor always checksums.
    if sums and len(known) < len(lines) and path.exists() and path.with_name("progress.jsonl").exists():
        words = count_words(len(lines) - len(known), "line", "lines")
        notices.append(f"checksums are missing: {words} of {path.name} could have been changed unnoticed")
    return values, notices, list(damaged)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _mask(numbers: Any) -> Rects:
    """One rectangle from its four numbers, or several rectangles."""
    if all(isinstance(part, list) for part in numbers):
        return tuple(Rect(*map(index, rect)) for rect in numbers)
    return Rect(*map(index, numbers))


def _seconds(cost: Any) -> float | None:
    seconds = cost.get("seconds") if isinstance(cost, Mapping) else None
    return seconds if isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0 else None


def find_images(run: StoredRun, dataset: str | None = None, data_dir: Path | None = None) -> ImageSource | str:
    """Open the images that were certified or validated on; return the reason if they are gone or changed.

    A `dataset` or `data_dir` named by the caller must lead to them.
    """
    config, identity = run.config, run.manifest["identity"]
    name = dataset or _text(config.get("validation")) or _text(config.get("dataset"))
    own = _text(config.get("data_dir"))
    if name is None:
        return "The run does not say where its images are; give their location as dataset."
    data = run.manifest.get("data") or {}
    recorded = _text((data if isinstance(run, StoredCertification) else data.get("validation") or {}).get("split"))
    reasons = []
    # A folder named now may have no splits.
    for split in dict.fromkeys((_text(config.get("split")), None, recorded if recorded != "all" else None)):
        try:
            source = open_dataset(name, data_dir=data_dir or (Path(own) if own else None), split=split)
            if source.listing_sha256() == identity.get("validation_sha256", identity.get("data_sha256")):
                return source
            reasons.append(f"the images in {printable(name)} are not those of the run (another sha256 of the listing)")
        except (PatchproofError, OSError) as error:
            reasons.append(printable(str(error)))
    if dataset is not None or data_dir is not None:
        raise InputError(reasons[0])
    return f"The images cannot be shown: {reasons[0]}; if they moved, give their new location as dataset or data_dir."


def find_weights(run: StoredCertification, trainings: Sequence[StoredTraining] = ()) -> Iterator[tuple[Path, bool]]:
    """Yield candidate paths of the run's weights, and whether its settings name them.

    Named paths are relative to the working directory or a parent of the run. Then come the checkpoints next to the run
    and those of the given trainings.
    """
    folder = run.folder.resolve()
    if run.weights is not None:
        yield from ((parent / Path(run.weights).expanduser(), True) for parent in (Path.cwd(), *folder.parents))
    for place in (folder.parent, *(training.folder.resolve() for training in trainings)):
        yield from ((place / name, False) for name in CHECKPOINTS)


def class_words(names: Mapping[int, str]) -> dict[int, str]:
    """Class names in words: WordNet ids, the folder names of ImageNet, are replaced by their meaning."""
    words = {label: wordnet_words(name) or name for label, name in names.items()}
    counts = Counter(words.values())
    return {k: printable(f"{word} ({names[k]})" if counts[word] > 1 else word) for k, word in words.items()}
