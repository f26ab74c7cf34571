"""Check that the engine is fast and sound on networks that nobody tuned it for.

    python benchmarks/engine.py --imagenet VAL --imagenette VAL --output benchmarks/results/engine-h200.json

VAL are folders of class folders. The networks have ImageNet weights (the `zoo`).

hostile: a network is rescaled: its convolutions have output channels scaled by 1e-4 to 1e5, which batch normalisation
undoes, so it is the same function. Measured are how much slower it is, and how many verdicts differ.
subset: counts the images that a fast precision certifies and exhaustive float32 at its own τ does not.
"""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import torch
from common import DEVICE, machine, open_images, parser, write
from torch import Tensor, nn

import patchproof as pp
from patchproof.masking import Measured
from patchproof.models import ImageClassifier, load_classifier, match_labels


def rescaled(classifier: ImageClassifier, generator: torch.Generator) -> ImageClassifier:
    """Return the same function with scales of 1e-4 to 1e5 between convolutions and their batch normalisations."""
    scaled = copy.deepcopy(classifier)
    layers: list[Any] = [part for part in scaled.modules() if isinstance(part, (nn.Conv2d, nn.BatchNorm2d))]
    with torch.no_grad():
        for conv, bn in itertools.pairwise(layers):
            if not (isinstance(conv, nn.Conv2d) and isinstance(bn, nn.BatchNorm2d)):
                continue
            assert bn.running_var is not None
            assert bn.running_mean is not None
            scale = 10 ** (torch.rand(bn.num_features, generator=generator) * 9 - 4).to(conv.weight)
            before = (bn.running_var + bn.eps).rsqrt()
            conv.weight.mul_(scale[:, None, None, None])
            if conv.bias is not None:
                conv.bias.mul_(scale)
            bn.running_mean *= scale
            bn.running_var *= scale**2
            bn.weight.mul_(before / (scale * (bn.running_var + bn.eps).rsqrt()))
    return scaled


def open_labelled(classifier: ImageClassifier, folder: str, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Images from all over the folder, and the classifier's labels for them."""
    images, labels = open_images(classifier, folder, count, device)
    return images, torch.tensor(match_labels(pp.open_dataset(folder).class_names, classifier))[labels].to(device)


def certify(
    classifier: ImageClassifier, images: Tensor, labels: Tensor, *, per_axis: int, **engine: Any
) -> tuple[Tensor, float, Measured]:
    """Verdicts with every pair of masks, labels per second, and the engine."""
    threat = pp.PatchThreat.square(image_size=classifier.input_size, percent=3)
    masks = pp.covering_masks(threat, per_axis=per_axis)
    measured, _ = pp.check_classifier(classifier, images[:512], masks, engine=pp.Engine(**engine))
    defense = pp.PatchCleanser(classifier, masks, threat, engine=measured, exhaustive=True)
    size = defense.images_at_once
    defense.certify(images[:size], labels[:size])  # kernels are chosen
    started = time.perf_counter()
    verdicts = [defense.certify(*batch).certified for batch in zip(images.split(size), labels.split(size), strict=True)]
    found = torch.cat(verdicts).cpu()
    return found, len(images) * len(masks.unions) / (time.perf_counter() - started), measured


def hostile(folder: str, count: int, device: str) -> dict[str, Any]:
    original = load_classifier("tf_efficientnet_lite0", "zoo").to(device).to(memory_format=torch.channels_last)
    images, labels = open_labelled(original, folder, count, device)
    scaled = rescaled(original, torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"images": len(images)}
    for precision in ("fp16", "auto"):
        verdicts, rate, _ = certify(original, images, labels, per_axis=6, precision=precision)
        others, its_rate, engine = certify(scaled, images, labels, per_axis=6, precision=precision)
        found[precision] = {
            "taken": engine.precision,
            "labels_per_second": rate,
            "rescaled": its_rate,
            "ratio": its_rate / rate,
            "certified": int(verdicts.sum()),
            "differ": int((verdicts != others).sum()),
        }
        print("hostile", precision, found[precision], flush=True)
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--imagenet", required=True)
    flags.add_argument("--imagenette", required=True)
    flags.add_argument("--images", type=int, default=300, help="for the hostile network; 0 leaves it out")
    flags.add_argument("--most", type=int, default=2000, help="ImageNette images for the subset")
    flags.add_argument("--models", nargs="+", default=["tf_efficientnet_lite0", "tf_efficientnet_lite1"])
    flags.add_argument("--device", default=DEVICE)
    arguments = flags.parse_args()
    device = arguments.device
    report: dict[str, Any] = machine(device)
    if arguments.images:
        report["hostile"] = hostile(arguments.imagenet, arguments.images, device)
    report["subset"] = []
    folders = (("imagenet", arguments.imagenet, 1000), ("imagenette", arguments.imagenette, arguments.most))
    for model, (name, folder, count) in itertools.product(arguments.models, folders):
        classifier = load_classifier(model, "zoo").to(device).to(memory_format=torch.channels_last)
        images, labels = open_labelled(classifier, folder, count, device)
        exact, _, _ = certify(classifier, images, labels, per_axis=3, precision="fp32")
        for way in ("fp16", "fp16 compiled", "bf16", "tf32"):
            precision, _, compiled = way.partition(" ")
            fast, _, _ = certify(classifier, images, labels, per_axis=3, precision=precision, compile=bool(compiled))
            found = {
                "model": model,
                "data": name,
                "images": len(images),
                "precision": way,
                "certified": int(fast.sum()),
                "certified_fp32": int(exact.sum()),
                "beyond_fp32": int((fast & ~exact).sum()),
            }
            print("subset", found, flush=True)
            report["subset"].append(found)
            write(report, arguments.output)  # after each row, so that a run cut short leaves what it measured


if __name__ == "__main__":
    main()
