"""Is the engine fast and sound on networks that nobody tuned it for?

    python benchmarks/engine.py --imagenet VAL --imagenette VAL --output benchmarks/results/engine-h200.json

VAL are folders of class folders. Two questions, on networks with ImageNet weights (the `zoo`):

hostile: a network whose convolutions have output channels scaled by 1e-4 to 1e5, which batch normalisation undoes, is
the same function. How much slower is it, and does any verdict differ?
subset: does any fast precision certify an image that exhaustive float32 at its own τ does not?
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patchproof as pp
from patchproof.data import iterate_batches
from patchproof.masking import Measured, as_images
from patchproof.models import ImageClassifier, load_classifier
from patchproof.runs import device_name, preprocessing_for, versions


def rescaled(classifier: ImageClassifier, generator: torch.Generator) -> ImageClassifier:
    """The same function, with scales of 1e-4 to 1e5 between each convolution and the batch normalisation after it."""
    scaled = copy.deepcopy(classifier)
    layers = [part for part in scaled.modules() if isinstance(part, (nn.Conv2d, nn.BatchNorm2d))]
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


def images_of(classifier: ImageClassifier, folder: Path, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Some images from all over the folder on the device, and the classes they belong to."""
    source = pp.open_dataset(str(folder))
    how = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    indices = [i * len(source) // count for i in range(count)] if count < len(source) else range(len(source))
    batches = list(iterate_batches(source, how, indices, batch_size=64, workers=8))
    classes = torch.tensor([(classifier.class_names or ()).index(name) for name in source.class_names])
    labels = classes[torch.cat([batch.labels for batch in batches])]
    return as_images(torch.cat([batch.images for batch in batches]), device), labels.to(device)


def certify(
    classifier: ImageClassifier, images: torch.Tensor, labels: torch.Tensor, *, per_axis: int, **engine: Any
) -> tuple[torch.Tensor, float, Measured]:
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


def hostile(folder: Path, count: int, device: str) -> dict[str, Any]:
    original = load_classifier("tf_efficientnet_lite0", "zoo").to(device).to(memory_format=torch.channels_last).eval()
    images, labels = images_of(original, folder, count, device)
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


def subset(
    folders: dict[str, tuple[Path, int]], models: list[str], ways: list[str], device: str
) -> Iterator[dict[str, Any]]:
    """`ways` are precisions; "fp16 compiled" is another copy of the network than "fp16"."""
    for model in models:
        classifier = load_classifier(model, "zoo").to(device).to(memory_format=torch.channels_last).eval()
        for name, (folder, count) in folders.items():
            images, labels = images_of(classifier, folder, count, device)
            exact, _, _ = certify(classifier, images, labels, per_axis=3, precision="fp32")
            for way in ways:
                precision, _, compiled = way.partition(" ")
                fast, _, _ = certify(
                    classifier, images, labels, per_axis=3, precision=precision, compile=bool(compiled)
                )
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
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imagenet", type=Path, required=True)
    parser.add_argument("--imagenette", type=Path, required=True)
    parser.add_argument("--images", type=int, default=300, help="for the hostile network; 0 leaves it out")
    parser.add_argument("--most", type=int, default=2000, help="ImageNette images for the subset")
    parser.add_argument("--models", nargs="+", default=["tf_efficientnet_lite0", "tf_efficientnet_lite1"])
    parser.add_argument("--ways", nargs="+", default=["fp16", "fp16 compiled", "bf16", "tf32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    folders = {"imagenet": (arguments.imagenet, 1000), "imagenette": (arguments.imagenette, arguments.most)}
    report: dict[str, Any] = {"device": device_name(torch.device(arguments.device)), "versions": versions()}
    if arguments.images:
        report["hostile"] = hostile(arguments.imagenet, arguments.images, arguments.device)
    report["subset"] = []
    for found in subset(folders, arguments.models, arguments.ways, arguments.device):
        report["subset"].append(found)
        if arguments.output:  # what is measured stays, should time end
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
