"""What a fast precision gains and costs: passes per second of one network in several forms, and how far gaps move.

    python benchmarks/precision.py --model tf_efficientnet_lite0 --weights zoo --images IMAGES --device cuda \
        --output benchmarks/results/precision-h200-tf_efficientnet_lite0.json

Rates are those of the bare network on one batch, again and again: under autocast, converted to the type, and compiled.
A gap is the lead of a masked copy's label over the runner-up; its change against float32 is what τ has to cover.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import patchproof as pp
from patchproof.data import iterate_batches, spread_indices
from patchproof.masking import AUTOCAST, as_images, tf32
from patchproof.models import ImageClassifier
from patchproof.runs import preprocessing_for


def rate(network: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, *, seconds: float) -> float:
    """Passes per second."""
    for _ in range(2):
        network(images)[0, 0].item()  # waits for the device
    passes, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        network(images)[0, 0].item()
        passes += len(images)
    return passes / (time.perf_counter() - started)


def rates(classifier: ImageClassifier, images: torch.Tensor, *, compiled: bool, seconds: float) -> dict[str, float]:
    """Passes per second by form."""
    found = {}
    with torch.inference_mode():
        for name, allowed in (("fp32", False), ("tf32", True)):
            with tf32(allowed):
                found[name] = rate(classifier.module, images, seconds=seconds)
        for name, dtype in AUTOCAST.items():
            with torch.autocast(images.device.type, dtype=dtype):
                found[f"{name} autocast"] = rate(classifier.module, images, seconds=seconds)
    for name, dtype in AUTOCAST.items():
        for form in (False, True) if compiled else (False,):
            converted = classifier.lowered(dtype, compiled=form)
            if converted is not None:
                with torch.inference_mode():
                    found[f"{name} {'compiled' if form else 'converted'}"] = rate(converted, images, seconds=seconds)
    return found


def gap_changes(classifier: ImageClassifier, images: torch.Tensor, chunk: int, copies: int) -> dict[str, float]:
    """Change of a gap against float32 (mean of the largest hundredth), over masked copies (2% patch, 6×6 masks)."""
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=classifier.input_size, percent=2), per_axis=6)
    found: dict[str, float] = {}
    for precision in ("bf16", "fp16", "tf32"):
        engine = pp.Engine(precision=precision, batch_size=chunk)  # type: ignore[arg-type]
        _, drift = pp.check_classifier(classifier, images, masks, engine=engine, copies=copies)
        found |= {precision: drift.changes[precision], "fp32 in other batches": drift.gap}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", default="zoo")
    parser.add_argument("--images", default="fashion-mini")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    source = pp.open_dataset(arguments.images)
    classifier = pp.load_classifier(arguments.model, arguments.weights).to(device)
    classifier = classifier.to(memory_format=torch.channels_last)
    preprocessing = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    indices = spread_indices(source, arguments.limit)
    pixels = torch.cat([b.images for b in iterate_batches(source, preprocessing, indices, batch_size=64)])
    images = as_images(pixels, device)
    batch = images.repeat(-(-arguments.chunk // len(images)), 1, 1, 1)[: arguments.chunk]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    report = {
        "model": arguments.model,
        "weights": arguments.weights,
        "device": name,
        "torch": torch.__version__,
        "chunk": arguments.chunk,
        "masked_copies": 6 * len(images),
        "passes_per_second": rates(classifier, batch, compiled=arguments.compile, seconds=arguments.seconds),
        "largest_gap_change": gap_changes(classifier, images, arguments.chunk, 6 * len(images)),
    }
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
