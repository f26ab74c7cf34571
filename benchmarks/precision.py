"""Measure each fast precision: passes per second of one network in several forms, and how far margins move.

    python benchmarks/precision.py --model tf_efficientnet_lite0 --weights zoo --images IMAGES --device cuda \
        --output benchmarks/results/precision-h200-tf_efficientnet_lite0.json

Rates are those of the bare network on one batch: under autocast, converted to the type, and compiled. A gap is the
margin of a masked copy's label over the runner-up; its change against float32 is what τ has to cover.
"""

from __future__ import annotations

import json

import torch
from common import DEVICE, machine, masked_pairs, open_images, parser, rate, write
from torch import Tensor

import patchproof as pp
from patchproof.masking import AUTOCAST, tf32
from patchproof.models import ImageClassifier


def rates(classifier: ImageClassifier, images: Tensor, *, compiled: bool) -> dict[str, float]:
    """Passes per second by form."""
    found = {}
    with torch.inference_mode():
        for name, allowed in (("fp32", False), ("tf32", True)):
            with tf32(allowed):
                found[name] = rate(classifier.module, images, seconds=1)
        for name, dtype in AUTOCAST.items():
            with torch.autocast(images.device.type, dtype=dtype):
                found[f"{name} autocast"] = rate(classifier.module, images, seconds=1)
    forms = {"converted": False, "compiled": True} if compiled else {"converted": False}
    for name, dtype in AUTOCAST.items():
        for form, asked in forms.items():
            lowered = classifier.lowered(dtype, compiled=asked)
            if lowered is not None:
                with torch.inference_mode():
                    found[f"{name} {form}"] = rate(lowered, images, seconds=1)
    return found


def gap_changes(classifier: ImageClassifier, images: Tensor, chunk: int, copies: int) -> dict[str, float]:
    """Change of a gap against float32 (mean of the largest hundredth), over masked copies (2% patch, 6×6 masks)."""
    masks = masked_pairs(classifier, percent=2)
    found: dict[str, float] = {}
    for precision in ("bf16", "fp16", "tf32"):
        engine = pp.Engine(precision=precision, batch_size=chunk)  # type: ignore[arg-type]
        _, drift = pp.check_classifier(classifier, images, masks, engine=engine, copies=copies)
        found[precision] = drift.changes[precision]
        found["fp32 in other batches"] = drift.gap
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="tf_efficientnet_lite0")
    flags.add_argument("--weights", default="zoo")
    flags.add_argument("--images", default="fashion-mini")
    flags.add_argument("--limit", type=int, default=200)
    flags.add_argument("--chunk", type=int, default=512)
    flags.add_argument("--compile", action="store_true")
    flags.add_argument("--device", default=DEVICE)
    arguments = flags.parse_args()
    chunk = arguments.chunk
    classifier = pp.load_classifier(arguments.model, arguments.weights).to(arguments.device)
    classifier = classifier.to(memory_format=torch.channels_last)
    images, _ = open_images(classifier, arguments.images, arguments.limit, arguments.device)
    batch = images.repeat(-(-chunk // len(images)), 1, 1, 1)[:chunk]
    report = {
        **machine(arguments.device),
        "model": arguments.model,
        "weights": arguments.weights,
        "chunk": chunk,
        "masked_copies": 6 * len(images),
        "passes_per_second": rates(classifier, batch, compiled=arguments.compile),
        "largest_gap_change": gap_changes(classifier, images, chunk, 6 * len(images)),
    }
    print(json.dumps(report, indent=2))
    write(report, arguments.output)


if __name__ == "__main__":
    main()
