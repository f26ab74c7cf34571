"""What a fast precision gains and costs: passes a second of one network in several forms, and how far gaps move.

    python benchmarks/precision.py --model tf_efficientnet_lite0 --weights zoo --images IMAGES --device cuda \
        --output benchmarks/results/precision-h200-tf_efficientnet_lite0.json

Rates are those of the bare network on a batch that lies ready: under autocast, converted to the type, and compiled. A
gap is the lead of a masked copy's label over the runner-up; its change against float32 is what τ has to cover.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from patchproof.checks import _gap_change
from patchproof.cli._setup import choose_preprocessing
from patchproof.data import iterate_batches, open_dataset, spread_indices
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import AUTOCAST, as_images, fill_colour, forward, occlude, tf32
from patchproof.models import ImageClassifier, load_classifier
from patchproof.throughput import _rate
from patchproof.types import Precision


def rates(classifier: ImageClassifier, images: torch.Tensor, *, compiled: bool, seconds: float) -> dict[str, float]:
    """Passes a second by form."""
    network = classifier.eval().module
    found = {}
    with torch.inference_mode():
        for name, allowed in (("fp32", False), ("tf32", True)):
            with tf32(allowed):
                found[name] = _rate(network, images, seconds=seconds)
        for name, dtype in AUTOCAST.items():
            with torch.autocast(images.device.type, dtype=dtype):
                found[f"{name} autocast"] = _rate(network, images, seconds=seconds)
    for name, dtype in AUTOCAST.items():
        for form in (False, True) if compiled else (False,):
            converted = classifier.lowered(dtype, compiled=form)
            if converted is not None:
                with torch.inference_mode():
                    words = "compiled" if form else "converted"
                    found[f"{name} {words}"] = _rate(converted, images, seconds=seconds)
    return found


def gap_changes(classifier: ImageClassifier, images: torch.Tensor, chunk: int) -> dict[str, float]:
    """Largest change of a gap against float32, over six masked copies an image (2% patch, 6×6 masks)."""
    masks = covering_masks(PatchThreat.square(image_size=classifier.input_size, percent=2), per_axis=6)
    keep, fill = masks.keep(images.device), fill_colour(classifier, images)
    drawn = torch.randint(len(masks), (2, 6 * len(images)), generator=torch.Generator().manual_seed(0))
    first, second = drawn.to(images.device)
    of = torch.arange(len(images), device=images.device).repeat(6)

    def logits(size: int, precision: Precision) -> torch.Tensor:
        parts = zip(of.split(size), first.split(size), second.split(size), strict=True)
        copies = (occlude(images[i], keep[a] & keep[b], fill) for i, a, b in parts)
        return torch.cat([forward(classifier, part, precision=precision) for part in copies])

    sure = logits(chunk, "fp32")
    others: tuple[Precision, ...] = ("bf16", "fp16", "tf32")
    found: dict[str, float] = {p: _gap_change(logits(chunk, p), sure) for p in others}
    return {**found, "fp32 in other batches": _gap_change(logits(max(1, chunk // 6), "fp32"), sure)}


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
    source = open_dataset(arguments.images)
    classifier = load_classifier(arguments.model, arguments.weights, num_classes=None).eval().to(device)
    classifier = classifier.to(memory_format=torch.channels_last)
    preprocessing = choose_preprocessing(classifier, low_resolution=source.low_resolution)
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
        "largest_gap_change": gap_changes(classifier, images, arguments.chunk),
    }
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
