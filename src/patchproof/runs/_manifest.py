"""What a run was made with: enough to repeat it, and to refuse going on with something else."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from patchproof.data import ImageSource
from patchproof.masking import Drift, Measured
from patchproof.models import classifier_summary, weights_sha256
from patchproof.runs._files import BEGIN_AGAIN, plain
from patchproof.types import CheckError, Preprocessing
from patchproof.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "scipy")
TAU_MAY_GROW = 2.0
"""The safety factors of τ are several times this."""


def run_manifest(
    command: str,
    defense: Any,
    source: ImageSource,
    *,
    images: str,
    data_sha256: str,
    preprocessing: Preprocessing | None,
    device: torch.device,
    measured: tuple[Measured, Drift] | None,
    batch_size: int,
    processes: int,
    config: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Of a certification or an attack. `identity` is what a record depends on, and may not change while it goes on."""
    classifier, masks = getattr(defense, "classifier", None), getattr(defense, "masks", None)
    model = None if classifier is None else classifier_summary(classifier)
    return {
        "schema": SCHEMA,
        "command": command,
        "config": dict(config),
        "identity": plain(
            {
                "architecture": model and model["architecture"],
                "weights_sha256": None if classifier is None else weights_sha256(classifier),
                "data_sha256": data_sha256,
                "images": images,
                "preprocessing": preprocessing_facts(preprocessing),
                "fill": model and model["fill"],
                "device": device.type,
                "defense": {**asdict(defense.threat), "name": defense.name, "guarantee": defense.guarantee}
                | defense.describe(),
                **({} if plan is None else {"attack": plan}),
            }
        ),
        "guarantee": defense.guarantee,
        "model": model,
        "data": {
            "name": source.name,
            "split": source.split,
            "images": len(source),
            "class_names": list(source.class_names),
            "low_resolution": source.low_resolution,
        },
        **({} if masks is None else {"masks": mask_facts(masks)}),
        "tau": None if measured is None else tau_facts(*measured),
        "batch_size": batch_size,
        "precision": getattr(getattr(defense, "engine", None), "precision", "fp32"),
        "processes": processes,
        **made_with(device),
    }


def mask_facts(masks: Any) -> dict[str, Any]:
    rects = [[r.top, r.left, r.height, r.width] for r in masks.rects]
    return {"image_size": list(masks.image_size), "rects": rects}


def tau_facts(engine: Measured, drift: Drift) -> dict[str, Any]:
    return {"fast": engine.tau, "fp32": engine.tau_fp32, "drift": asdict(drift) | {"bound": drift.bound}}


def preprocessing_facts(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    """`cover` only where it is used."""
    facts = None if preprocessing is None else plain(asdict(preprocessing))
    return facts if facts is None or facts["cover"] else {k: v for k, v in facts.items() if k != "cover"}


def stored_engine(
    engine: Measured, stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path, keep_batch: bool
) -> Measured:
    """The τ that a run began with, as long as what is measured now is not far from it, and its batch size unless
    `keep_batch` asks for the present one."""
    try:
        for kind in ("fast", "fp32"):
            before, now = stored["tau"][kind], current["tau"][kind]
            if now > TAU_MAY_GROW * before:
                raise CheckError(
                    f"{where} was begun with τ({kind}) = {before:.3g}, but here and now it would be {now:.3g}: another "
                    "device, torch or batch_size; go on where it was begun, or choose another folder"
                )
        return Measured(
            precision=engine.precision,
            compile=engine.compile,
            batch_size=current["batch_size"] if keep_batch else stored["batch_size"],
            tau=stored["tau"]["fast"],
            tau_fp32=stored["tau"]["fp32"],
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckError(f"{where / 'manifest.json'} is damaged ({error!r}); {BEGIN_AGAIN}") from error


def made_with(device: torch.device) -> dict[str, Any]:
    return {"device": device_name(device), "versions": versions(), "commit": source_commit()}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"


def versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"patchproof": __version__, "python": platform.python_version(), **found}


def source_commit() -> str | None:
    """The commit this package runs from, `+changes` if it has been edited since; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None
