"""How fast a classifier is certified, next to what the bare network can do and to a loop like the published one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchproof import runs
from patchproof.defenses.patchcleanser import majority_label
from patchproof.geometry import MaskSet
from patchproof.masking import AUTOCAST, show, tf32
from patchproof.types import Classifier, Precision

PEER_BATCH = 16
"""Images in a batch of PatchCleanser's published scripts."""


@dataclass(frozen=True)
class Took:
    """`passes` forward passes on `images` images took so many seconds. `peak_bytes` is the most memory held at once: on
    a GPU what torch allocated beyond what was held before, elsewhere all of the process since it began."""

    seconds: float
    passes: int
    images: int
    peak_bytes: int


def timed(work: Callable[[], tuple[Tensor, int]], *, images: int, device: torch.device) -> tuple[Tensor, Took]:
    """What `work` answers for so many images, and what it took; it says how many passes. The device is waited for."""
    held = 0
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    found, passes = work()
    _wait(device)
    seconds = time.perf_counter() - started
    return found, Took(seconds, passes, images, (runs.peak_memory(device) or 0) - held)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raw_rate(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    precision: Precision,
    compiled: bool = False,
    seconds: float = 1.0,
) -> float:
    """Forward passes per second of the bare network, again and again on one batch in memory: no masks, no reading.

    The better of a network converted to the type of `precision` and, where that is bf16 or fp16, autocast; channels
    last, which is the faster layout on GPUs and CPUs alike.
    """
    dtype = AUTOCAST.get(precision)
    images = images.contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(network).eval().to(memory_format=torch.channels_last)
    converted = plain if dtype is None else copy.deepcopy(plain).to(dtype)
    if compiled:
        converted.compile(dynamic=False)

    def autocast(batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, dtype=dtype):
            return plain(batch)

    with torch.inference_mode(), tf32(precision != "fp32"):
        rate = _rate(converted, images if dtype is None else images.to(dtype), seconds=seconds)
        return rate if dtype is None or compiled else max(rate, _rate(autocast, images, seconds=seconds))


def _rate(network: Callable[[Tensor], Tensor], images: Tensor, *, seconds: float) -> float:
    for _ in range(2):
        network(images)
    _wait(images.device)
    passes, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        network(images)
        passes += len(images)
        if passes % (4 * len(images)) == 0:
            _wait(images.device)
    _wait(images.device)
    return passes / (time.perf_counter() - started)


def peer_certify(
    classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], masks: MaskSet
) -> tuple[Bool[Tensor, " b"], int]:
    """Certified or not, and the passes it took, the way PatchCleanser's scripts do it (Xiang et al. 2022).

    Batches of 16 images; one forward pass of the batch for each pair of masks, all pairs, whatever came before; float32
    as torch sets it up, gradients on, and each answer fetched at once.
    """
    keep = masks.keep(images.device)
    certified, passes = [], 0
    for batch, wanted in zip(images.split(PEER_BATCH), labels.split(PEER_BATCH), strict=True):
        right = torch.ones(len(batch), dtype=torch.bool)
        for first, second in combinations_with_replacement(range(len(masks)), 2):
            logits = show(classifier, batch, (keep[first] & keep[second]).expand(len(batch), -1, -1, -1))
            right &= (logits.argmax(dim=1) == wanted).cpu()
            passes += len(batch)
        certified.append(right)
    return torch.cat(certified), passes


def peer_predict(
    classifier: Classifier, images: Float[Tensor, "b c h w"], masks: MaskSet
) -> tuple[Int64[Tensor, " b"], int]:
    """Double masking the same way: a pass for each mask, and for each disagreeing copy once more for every mask."""
    keep = masks.keep(images.device)
    answers, passes = [], 0
    for batch in images.split(PEER_BATCH):
        labels_under = [show(classifier, batch, k.expand(len(batch), -1, -1, -1)).argmax(dim=1).cpu() for k in keep]
        first = torch.stack(labels_under, dim=1)
        passes += first.numel()
        for image, labels in zip(batch, first, strict=True):
            answer = int(majority_label(labels[None]))
            for number in torch.nonzero(labels != answer)[:, 0].tolist():
                second = [int(show(classifier, image[None], (keep[number] & k)[None]).argmax()) for k in keep]
                passes += len(second)
                if set(second) == {int(labels[number])}:
                    answer = int(labels[number])
                    break
            answers.append(answer)
    return torch.tensor(answers), passes
