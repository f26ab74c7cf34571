"""The manifest of a run: everything needed to repeat it, and to refuse to resume it with something else."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchproof.data import BadImageError, FolderSource, ImageSource, default_preprocessing, open_class_folders
from patchproof.machine import BEGIN_AGAIN
from patchproof.masking import Drift, Measured, require_two
from patchproof.models import EMBEDDED_SOURCE, match_labels
from patchproof.types import CheckError, InputError, PatchproofError, Preprocessing, Size, kind_of
from patchproof.version import __version__

SCHEMA = 1
SEEN = {
    "trained_on": "not held out: the network was trained on these very images",
    "selected_on": "optimistic: the checkpoint was chosen among the epochs of its training by its certified accuracy "
    "on these very images; checkpoint-last was not chosen, and other images would be independent",
}
"""Remarks on a network whose history names the images that are certified now."""

MEASURED_AS = {"fast": "fast", "tf32": "tf32_measured", "fp32": "fp32"}
"""For each τ of a manifest, the measurement to compare it with: TF32 is measured even if no step uses it."""

TAU_MAY_GROW = 2.0
"""Factor by which τ may grow between sessions; its safety factors are several times this."""


def new_manifest(
    command: str, config: Mapping[str, Any] | None, identity: Any, facts: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Build a manifest. `identity` is what the outcome depends on: it may not change when the run is resumed."""
    return {
        "schema": SCHEMA,
        "command": command,
        "config": plain(config or {}, "config"),
        "identity": plain(identity, "what describe() returns"),
        **plain(facts, "what classifier and data say of themselves"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": versions(),
        "commit": source_commit(),
    }


def plain(value: Any, name: str) -> Any:
    """Return the value after a round trip through JSON: lists for tuples, text for keys and paths, numpy's numbers."""

    def other(part: Any) -> Any:
        if isinstance(part, Real):
            return int(part) if isinstance(part, Integral) else float(part)
        if isinstance(part, Path):
            return str(part)
        raise TypeError(f"{kind_of(part)} is not")

    try:
        return json.loads(json.dumps(value, allow_nan=False, default=other))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be JSON, with finite numbers: {error}") from error


def preprocessing_facts(preprocessing: Preprocessing) -> dict[str, Any]:
    """Fields of the preprocessing; `cover` only if it is used, so that manifests older than this field still match."""
    return {name: value for name, value in asdict(preprocessing).items() if name != "cover" or value}


def preprocessing_for(classifier: Any, low_resolution: bool, image_size: Size) -> Preprocessing:
    """Default preprocessing of images for this classifier."""
    return default_preprocessing(
        low_resolution,
        image_size,
        interpolation=getattr(classifier, "interpolation", "bicubic"),
        crop_pct=getattr(classifier, "crop_pct", 1.0),
    )


def outputs_for(source: ImageSource, classifier: Any) -> Tensor | None:
    """Classifier output for each label of the source; None if its classes have no names, so that labels are outputs."""
    require_two(getattr(classifier, "num_classes", None))
    return torch.tensor(match_labels(source.class_names, classifier, source.name)) if source.class_names else None


def require_labels(source: ImageSource, indices: Sequence[int], classes: int | None, kind: str = "") -> None:
    """Refuse labels that are no class of the source or, if its classes have no names, no output of the classifier.

    An image that cannot be read may have any label.
    """
    classes = len(source.class_names) or classes
    known = "cannot be negative" if classes is None else f"are 0 to {classes - 1}"
    for index in indices:
        label = source.labels[index]
        if label < 0 or (classes is not None and label >= classes):
            with suppress(BadImageError):
                source.load(index)
                raise InputError(f"{kind}image {index} has the label {label}; labels {known}")


def source_facts(source: ImageSource, indices: Sequence[int] | None = None) -> dict[str, Any]:
    """Name, split, number and digest of the images that a network was trained, selected or tested on."""
    count = len(source) if indices is None else len(indices)
    return {"name": source.name, "split": source.split, "images": count, "sha256": source.listing_sha256(indices)}


def network_remarks(classifier: Any, data_sha256: str | None = None) -> list[str]:
    """Warnings that belong next to any number about this network; for an ensemble, those of all members.

    It may be untrained, made for demonstrations, or not independent of the images with the digest `data_sha256`.
    """
    members = getattr(classifier, "members", None)
    if members is not None:
        return list(dict.fromkeys(remark for each in members for remark in network_remarks(each, data_sha256)))
    source = str(getattr(classifier, "source", ""))
    remarks = []
    if source.startswith("random weights"):
        remarks.append(
            "random network: its weights were drawn at random and have learned nothing, so the numbers say nothing "
            "about a trained network"
        )
    if source == EMBEDDED_SOURCE:
        remarks.append(
            "the embedded demonstration network: 28×28 pixels, ten kinds of clothing, trained on fashion-mini, "
            "not a network of yours"
        )
    for kind, words in SEEN.items():
        history = getattr(classifier, "history", None)
        seen = history.get(kind) if isinstance(history, Mapping) else None
        if isinstance(seen, Mapping) and data_sha256 is not None and seen.get("sha256") == data_sha256:
            remarks.append(words)
    return remarks


def measured_facts(engine: Measured, drift: Drift) -> dict[str, Any]:
    """The part of a manifest that is known once τ is measured."""
    return {
        "tau": {
            "fast": engine.tau,
            "tf32": engine.tau_tf32,
            "fp32": engine.tau_fp32,
            "tf32_measured": drift.tau("tf32") if "tf32" in drift.changes else None,
            "drift": {**asdict(drift), "bound": drift.bound},
        },
        "batch_size": int(engine.batch_size),
        "precision": engine.precision,
        "compile": engine.compile,
    }


def stored_engine(
    engine: Measured, stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Any, keep_batch: bool
) -> Measured:
    """Return the engine with the τ that the run began with, unless the τ measured now is much larger.

    Its batch size is that of the first session too, unless `keep_batch` is set.
    """
    try:
        for kind, measured in MEASURED_AS.items():
            before, now = stored["tau"].get(kind), current["tau"].get(measured)
            if before is not None and now is not None and now > TAU_MAY_GROW * before:
                raise CheckError(
                    f"{where} was begun with τ({kind}) = {before:.3g}, but here and now it would be {now:.3g}: another "
                    "device, torch or batch_size; continue where it was begun, or choose another folder"
                )
        batch_size = current["batch_size"] if keep_batch else stored["batch_size"]
        return replace(engine, batch_size=batch_size, **stored_taus(stored["tau"]))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckError(f"{where}/manifest.json is damaged ({error!r}); {BEGIN_AGAIN}") from error


def stored_taus(tau: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Measured` from the τ of a manifest."""
    return {"tau": tau["fast"], "tau_fp32": tau["fp32"], "tau_tf32": tau.get("tf32")}


def agree(current: dict[str, Any], everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes with other weights, images or settings; use the largest τ and smallest batch size of all."""
    for rank, theirs in enumerate(everyone):
        for key, value in current["identity"].items():
            other = theirs["identity"].get(key)
            if other != value:
                raise CheckError(
                    f"process {rank} of {len(everyone)} has another {key}: {other} instead of {value}; give every "
                    "machine the same files"
                )
        if current["tau"] is not None:
            for kind, measured in MEASURED_AS.items():
                ours, other = current["tau"][kind], theirs["tau"][measured]
                if ours is not None and other is not None:
                    current["tau"][kind] = max(ours, other)
        current["batch_size"] = min(current["batch_size"], theirs["batch_size"])


def changes_since(listing_sha256: str, source: ImageSource) -> str | None:
    """An error message if a folder of images now lists other paths, labels or file sizes; else None."""
    if not isinstance(source, FolderSource):
        return None
    again = "put the files back as they were and begin again in another folder"
    try:
        now = open_class_folders(
            source.root, name=source.name, split=source.split, low_resolution=source.low_resolution
        ).listing_sha256()
    except (PatchproofError, OSError) as error:
        return f"the data set changed during the run ({error}); {again}"
    return None if now == listing_sha256 else f"the data set changed during the run; {again}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'})"


def versions() -> dict[str, str]:
    packages = ("torch", "torchvision", "timm", "numpy", "pillow", "scipy")
    found = {name: metadata.version(name) for name in packages}
    return {"patchproof": __version__, "python": platform.python_version(), **found}


def source_commit() -> str | None:
    """Commit of the checkout that this package runs from, `+changes` if it was edited; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
