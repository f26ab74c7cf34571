"""What a run was made with: enough to repeat it, and to refuse going on with something else."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchproof import __version__
from patchproof.checks import FAST_SAFETY, SAFETY, Drift
from patchproof.cli._setup import Setup
from patchproof.config import CertifyConfig, TrainConfig, resolved
from patchproof.data import ImageSource
from patchproof.geometry import MaskSet
from patchproof.models import ImageClassifier, classifier_summary, weights_sha256
from patchproof.records import SCHEMA
from patchproof.training import Plan
from patchproof.types import Preprocessing

if TYPE_CHECKING:
    from patchproof.training.loop import Trainer

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "scipy")


def manifest(
    config: CertifyConfig,
    setup: Setup,
    source: ImageSource,
    indices: Sequence[int],
    drift: Drift,
    *,
    processes: int = 1,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": "certify",
        "config": resolved(config),
        "identity": identity(config, setup, source, indices),
        "model": classifier_summary(setup.classifier),
        "data": {
            "name": source.name,
            "split": source.split,
            "images": len(source),
            "class_names": list(source.class_names),
            "low_resolution": source.low_resolution,
        },
        "masks": {
            "image_size": list(setup.masks.image_size),
            "rects": [[r.top, r.left, r.height, r.width] for r in setup.masks.rects],
        },
        "tau": {
            "fast": setup.engine.tau,
            "fp32": setup.engine.tau_fp32,
            "safety": SAFETY,
            "fast_safety": FAST_SAFETY,
            "drift": asdict(drift),
        },
        "batch_size": setup.engine.chunk,
        "device": device_name(setup.device),
        "precision": setup.engine.precision,
        "compile": setup.engine.compile,
        "processes": processes,
        "versions": versions(),
        "commit": source_commit(),
    }


def identity(config: CertifyConfig, setup: Setup, source: ImageSource, indices: Sequence[int]) -> dict[str, Any]:
    """What may not change while a run goes on: anything a record depends on."""
    return {
        "architecture": setup.classifier.architecture,
        "weights_sha256": weights_sha256(setup.classifier),
        "data_sha256": source.listing_sha256(),
        "images": f"{len(indices)} of {len(source)}",
        "preprocessing": preprocessing_facts(setup.preprocessing),
        "threat_space": config.threat_space,
        "patch_sizes": _plain(setup.threat.patch_sizes),
        "masks": masks_in_words(setup.masks),
        "precision": setup.engine.precision,
        "compile": setup.engine.compile,
        "device": setup.device.type,
        "exhaustive": config.exhaustive,
    }


def masks_in_words(masks: MaskSet) -> str:
    """Enough to tell two grids apart, short enough to be read in an error."""
    rows, columns = masks.axes
    tops, lefts = [start for start, _ in rows], [start for start, _ in columns]
    rect = masks.rects[0]
    return f"{len(rows)}x{len(columns)} masks of {rect.height}x{rect.width} at rows {tops}, columns {lefts}"


def training_manifest(
    config: TrainConfig, plan: Plan, start: ImageClassifier, trainer: Trainer, held_out: ImageSource
) -> dict[str, Any]:
    """`start` has the weights that training begins with."""
    data = trainer.data
    return {
        "schema": SCHEMA,
        "command": "train",
        "config": resolved(config),
        "identity": {
            "weights_sha256": weights_sha256(start),
            "data_sha256": data.source.listing_sha256(),
            "validation_sha256": held_out.listing_sha256(),
            "images": f"{len(data.indices)} of {len(data.source)}",
            "preprocessing": preprocessing_facts(data.preprocessing),
            "plan": asdict(plan),
            "mask_patch": config.mask_patch,
            "validation_images": config.validation_images,
            "skip_bad": config.skip_bad,
            "device": trainer.accelerator.device.type,
        },
        "model": classifier_summary(start),
        "search": {"forwards": trainer.strategy.forwards, "backwards": trainer.strategy.backwards},
        "steps": trainer.total_steps,
        "processes": trainer.accelerator.num_processes,
        "device": device_name(trainer.accelerator.device),
        "precision": plan.precision,
        "versions": versions(),
        "commit": source_commit(),
    }


def preprocessing_facts(preprocessing: Preprocessing) -> dict[str, Any]:
    """`cover` only where it is asked for: runs begun before there was such a thing have none, and can go on."""
    facts: dict[str, Any] = _plain(asdict(preprocessing))
    return facts if preprocessing.cover else {name: value for name, value in facts.items() if name != "cover"}


def _plain(value: Any) -> Any:
    """As JSON will give it back: lists for tuples."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


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
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
