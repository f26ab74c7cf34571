"""What a run was made with: enough to repeat it, and to refuse to resume it with something else."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from patchproof.data import FolderSource, ImageSource, default_preprocessing, open_class_folders
from patchproof.masking import Measured
from patchproof.models import EMBEDDED_SOURCE
from patchproof.types import BEGIN_AGAIN, CheckError, InputError, PatchproofError, Preprocessing, Size
from patchproof.version import __version__

SCHEMA = 1
SEEN = {
    "trained_on": "not held out: the network was trained on these very images",
    "selected_on": "optimistic: the checkpoint was chosen among the epochs of its training by its certified accuracy "
    "on these very images; checkpoint-last was not chosen, and other images would be independent",
}
"""What a checkpoint's history says of the images certified now."""

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "scipy")
MEASURED_AS = {"fast": "fast", "tf32": "tf32_measured", "fp32": "fp32"}
"""Each τ of a manifest, and what it is to be compared with: TF32 is measured also where it is no step."""

TAU_MAY_GROW = 2.0
"""The safety factors of τ are several times this."""


def new_manifest(
    command: str,
    config: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    facts: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """`identity` is what the outcome depends on: it may not change when the run is resumed."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made_with = {"date": now, "device": device_name(device), "versions": versions(), "commit": source_commit()}
    what = {"schema": SCHEMA, "command": command, "config": dict(config or {}), "identity": plain(identity)}
    return {**what, **facts, **made_with}


def plain(value: Any) -> Any:
    """The value after a round trip through JSON: lists for tuples, keys as text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"what describe() returns must be JSON, with finite numbers: {error}") from error


def preprocessing_facts(preprocessing: Preprocessing) -> dict[str, Any]:
    """`cover` only where it is used."""
    return {name: value for name, value in asdict(preprocessing).items() if name != "cover" or value}


def preprocessing_for(classifier: Any, low_resolution: bool, image_size: Size) -> Preprocessing:
    """How images of any size become the input of this classifier."""
    return default_preprocessing(
        low_resolution,
        image_size,
        interpolation=getattr(classifier, "interpolation", "bicubic"),
        crop_pct=getattr(classifier, "crop_pct", 1.0),
    )


def source_facts(source: ImageSource, indices: Sequence[int] | None = None) -> dict[str, Any]:
    """Which images: recorded with what was learned from them or chosen on them."""
    count = len(source) if indices is None else len(indices)
    return {"name": source.name, "split": source.split, "images": count, "sha256": source.listing_sha256(indices)}


def network_remarks(classifier: Any, data_sha256: str | None = None) -> list[str]:
    """What a reader must know of the network beside any number: untrained, for demonstrations, or not independent of
    the images with this digest. Of an ensemble, what holds of any member."""
    members = getattr(classifier, "members", None)
    if members is not None:
        return list(dict.fromkeys(remark for each in members for remark in network_remarks(each, data_sha256)))
    source, history = str(getattr(classifier, "source", "")), getattr(classifier, "history", {})
    remarks = []
    if source.startswith("random weights"):
        remarks.append(
            "random network: its weights were drawn at random and have learned nothing, so the numbers say nothing "
            "about a trained network"
        )
    if source == EMBEDDED_SOURCE:
        remarks.append(
            "the embedded demonstration network: 28×28 pixels, ten kinds of clothing, trained on fashion-mini; name "
            "your own as weights"
        )
    for kind, words in SEEN.items():
        seen = history.get(kind)
        if isinstance(seen, Mapping) and data_sha256 is not None and seen.get("sha256") == data_sha256:
            remarks.append(words)
    return remarks


def stored_engine(
    engine: Measured, stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path, keep_batch: bool
) -> Measured:
    """The τ that a run began with, as long as what is measured now is not far from it, and its batch size unless
    `keep_batch` asks for the present one."""
    try:
        for kind, measured in MEASURED_AS.items():
            before, now = stored["tau"].get(kind), current["tau"].get(measured)
            if before is not None and now is not None and now > TAU_MAY_GROW * before:
                raise CheckError(
                    f"{where} was begun with τ({kind}) = {before:.3g}, but here and now it would be {now:.3g}: another "
                    "device, torch or batch_size; go on where it was begun, or choose another folder"
                )
        batch_size = current["batch_size"] if keep_batch else stored["batch_size"]
        return replace(engine, batch_size=batch_size, **stored_taus(stored["tau"]))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckError(f"{where / 'manifest.json'} is damaged ({error!r}); {BEGIN_AGAIN}") from error


def stored_taus(tau: Mapping[str, Any]) -> dict[str, Any]:
    """The τ of a manifest, as arguments of `Measured`."""
    return {"tau": tau["fast"], "tau_fp32": tau["fp32"], "tau_tf32": tau.get("tf32")}


def agree(current: dict[str, Any], everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes with other weights, images or settings; take the largest τ and the smallest chunk of all."""
    for rank, theirs in enumerate(everyone):
        different = [key for key, value in current["identity"].items() if theirs["identity"].get(key) != value]
        if different:
            raise CheckError(
                f"process {rank} of {len(everyone)} has another {different[0]}: "
                f"{theirs['identity'].get(different[0])} instead of {current['identity'][different[0]]}; give every "
                "machine the same files"
            )
        if current["tau"] is not None:
            for kind, measured in MEASURED_AS.items():
                ours, other = current["tau"][kind], theirs["tau"][measured]
                if ours is not None and other is not None:
                    current["tau"][kind] = max(ours, other)
        current["batch_size"] = min(current["batch_size"], theirs["batch_size"])


def changes_since(listing_sha256: str, source: ImageSource) -> str | None:
    """The complaint if a folder of images lists other paths, labels or file sizes than before; else None."""
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
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)})"


def versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"patchproof": __version__, "python": platform.python_version(), **found}


def source_commit() -> str | None:
    """The commit this package runs from, `+changes` if it has been edited since; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
