"""How fast this machine certifies, next to the bare network and a loop like PatchCleanser's published one."""

from __future__ import annotations

import copy
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchproof.data import ImageSource, iterate_batches, spread_indices
from patchproof.defenses import PatchCleanser, device_of
from patchproof.defenses.patchcleanser import majority_label
from patchproof.geometry import MaskSet
from patchproof.masking import AUTOCAST, Audit, Drift, Engine, as_images, masks_for, show, tf32
from patchproof.models import ImageClassifier, match_labels, rewrap
from patchproof.runs import default_workers, device_name, measure_tau, peak_memory, preprocessing_for, versions
from patchproof.types import Classifier, InputError, Precision

SCALED_PASSES = 20_000
"""Most passes for each number of masks, approximately, when cost is measured against masks."""

LATENCIES = 32
"""Number of images that are answered one at a time, for latency."""

PEER_BATCH = 16
"""Batch size of PatchCleanser's published scripts."""

Work = Callable[[Tensor, Tensor], tuple[Tensor, int, Mapping[str, int]]]
"""(images, labels) -> an answer per image, passes, and how many labels each later precision decided again."""


@dataclass
class Subject:
    """A defence with images and labels on its device; `rows` holds a measurement of each way to answer them."""

    defense: PatchCleanser
    drift: Drift
    images: Tensor
    labels: Tensor
    rows: list[dict[str, Any]] = field(default_factory=list)

    def timed(self, work: Work, name: str | None = None, count: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return the answers for the first `count` images and their cost, which becomes a row if it has a name.

        `peak_bytes` is, on a GPU, what torch allocated beyond what it held before; elsewhere the peak of the process
        since it began. `needed` counts each label once, however often it was decided.
        """
        images, labels, device = self.images[:count], self.labels[:count], self.images.device
        held = 0
        wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        started = time.perf_counter()
        answers, passes, again = work(images, labels)
        wait(device)
        seconds = time.perf_counter() - started
        cost: dict[str, Any] = {"images": len(images), "passes": passes, "seconds": seconds}
        if name is not None:
            engine: Any = self.defense.engine
            needed = passes - sum(again.values())
            if engine.tau_tf32 is not None:  # a label that float32 decided was tried in TF32 before
                needed -= again.get("fp32", 0)
            row = {"name": name, **cost, "needed": needed, "decided_again": dict(again)}
            for counted in ("passes", "needed", "images"):
                row[f"{counted}_per_second"] = row[counted] / seconds
            self.rows.append(row)
        return answers.cpu(), {**cost, "peak_bytes": (peak_memory(device) or 0) - held}

    def certify(self, name: str | None = None, count: int | None = None, **changes: Any) -> tuple[Tensor, Any]:
        """Time a copy of the defence with these changes."""
        return self.timed(ours(replace(self.defense, **changes)), name, count)


def ours(defense: PatchCleanser, *, predict: bool = False) -> Work:
    """Certification or prediction by a fresh defence, in its own batches."""

    def work(images: Tensor, labels: Tensor) -> tuple[Tensor, int, Mapping[str, int]]:
        size = defense.images_at_once
        batches = zip(images.split(size), labels.split(size), strict=True)
        answers = [defense.predict(x) if predict else defense.certify(x, y).certified for x, y in batches]
        again: Counter[str] = Counter()
        for redone in defense.evaluator.audit.redone.values():
            again.update(redone.steps)
        return torch.cat(answers), defense.evaluator.passes, again

    return work


def open_subject(
    defense: Any,
    source: ImageSource,
    *,
    limit: int | None,
    workers: int | None,
    surviving: bool,
    say: Callable[[str], None],
) -> Subject:
    """Load the images and measure τ. If the data has other classes than the network, its own answers are the labels."""
    classifier, device = defense.classifier, device_of(defense)
    preprocessing = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    indices = spread_indices(source, limit)
    workers = workers or default_workers()
    batches = list(iterate_batches(source, preprocessing, indices, batch_size=64, workers=workers, skip_bad=True))
    images = as_images(torch.cat([batch.images for batch in batches]), device)
    if surviving:  # label 0 always wins, so every image survives to the last pair
        for network in (one for one in classifier.modules() if isinstance(one, ImageClassifier)):
            bias = getattr(getattr(network.module, "get_classifier", lambda: None)(), "bias", None)
            if bias is None:
                raise InputError("surviving needs a network whose last layer has a bias, as timm's have")
            bias.data[0] += 100
    engine, drift = measure_tau(defense, source, indices, preprocessing)  # type: ignore[misc]
    defense = defense.with_engine(engine)
    try:
        labels = torch.tensor(match_labels(source.class_names, classifier))[torch.cat([b.labels for b in batches])]
    except InputError:
        say(f"{source.name} has other classes than the network, whose own answers are the labels here")
        labels = torch.cat([defense.evaluator.labels(some) for some in images.split(defense.images_at_once)])
    labels = torch.zeros_like(labels) if surviving else labels
    return Subject(defense, drift, images, labels.to(device))


def measure(
    defense: Any,
    source: ImageSource,
    *,
    limit: int | None = 64,
    workers: int | None = None,
    peer_images: int = 16,
    surviving: bool = False,
    reference: bool = False,
    scaling: bool = False,
    seconds: float = 1.0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure everything that `patchproof bench` shows or writes, by name."""
    if peer_images < 0:
        raise InputError(f"peer_images cannot be negative: {peer_images}")
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds must be positive and finite, not {seconds}")
    if getattr(defense, "name", None) != PatchCleanser.name:
        raise InputError(f"bench measures {PatchCleanser.name}, not {defense.name}")
    subject = open_subject(defense, source, limit=limit, workers=workers, surviving=surviving, say=say)
    defense, images, labels = subject.defense, subject.images, subject.labels
    classifier, masks, engine = defense.classifier, defense.masks, defense.engine
    say(f"the bare network {classifier.architecture}, {engine.batch_size} images at once")
    raw = raw_rates(getattr(classifier, "module", classifier), images, engine, seconds=seconds)

    say(f"ours: {len(images)} images, {len(masks)} masks, at most {len(masks.unions)} passes per image")
    first = images[: defense.images_at_once], labels[: defense.images_at_once]
    for warm in (replace(defense), replace(defense, exhaustive=True)):  # compiles, chooses kernels
        warm.certify(*first)
    replace(defense).predict(first[0])
    every, cost = subject.certify("ours, every pair", exhaustive=True)
    if getattr(classifier, "drop_tokens", False):
        say("the same masks, no token dropped")
        unmeasured = Engine(precision=engine.precision, batch_size=engine.batch_size, compile=engine.compile)
        shown = replace(defense, classifier=rewrap(classifier, drop_tokens=False), engine=unmeasured, exhaustive=True)
        shown.certify(*first)
        shown.evaluator.passes, shown.evaluator.audit = 0, Audit()
        subject.timed(ours(shown), "ours, all tokens")
    verdicts, _ = subject.certify("ours, early exit")
    answers, _ = subject.timed(ours(replace(defense), predict=True), "ours, predict")
    differ = {"every pair": int((verdicts != every).sum())}

    count = min(peer_images, len(images))
    if count:
        say(f"a loop like the published one, {count} {'image' if count == 1 else 'images'}")
        for size in (PEER_BATCH, 1):  # its batch sizes: a GPU's kernels are chosen before the clock starts
            classifier(images[:count][:size])
        peers, _ = subject.timed(lambda x, y: (*peer_certify(classifier, x, y, masks), {}), "peer, certify", count)
        differ["peer"] = int((verdicts[:count] != peers).sum())
        peers, _ = subject.timed(lambda x, _: (*peer_predict(classifier, x, masks), {}), "peer, predict", count)
        differ["peer, predict"] = int((answers[:count] != peers).sum())
    if reference:
        say("the reference: float32, every pair")
        exact = replace(engine, precision="fp32", compile=False, tau=0.0, tau_tf32=None)
        found, _ = subject.certify("reference, float32", engine=exact, exhaustive=True)
        differ["reference"] = int((verdicts != found).sum())

    alone, latencies = replace(defense), []
    for image in images[:LATENCIES].split(1):
        started = time.perf_counter()
        alone.predict(image).tolist()
        latencies.append(time.perf_counter() - started)
    return {
        "machine": {"device": device_name(images.device), "system": platform.system(), "versions": versions()},
        "model": classifier.architecture,
        "data": source.name,
        "images": len(images),
        "masks": len(masks),
        "pairs": len(masks.unions),
        "batch_size": engine.batch_size,
        "precision": engine.precision,
        "compile": engine.compile,
        "tau": {"fast": engine.tau, "tf32": engine.tau_tf32, "fp32": engine.tau_fp32},
        "drift": asdict(subject.drift),
        "raw_passes_per_second": raw,
        "rows": subject.rows,
        "latency": {"images": len(latencies), "median": statistics.median(latencies), "largest": max(latencies)},
        "certified": int(verdicts.sum()),
        "differ": differ,
        "peak_bytes": cost["peak_bytes"],
        "scaling": cost_growth(subject, say) if scaling else {},
    }


def cost_growth(subject: Subject, say: Callable[[str], None]) -> dict[str, Any]:
    """Cost of certification by masks per axis, and by number of images."""
    by_masks, images = [], len(subject.images)
    for per_axis in range(2, 9):
        masks = masks_for(subject.defense.classifier, subject.defense.threat, per_axis=per_axis)
        say(f"{len(masks)} masks")
        _, cost = subject.certify(count=min(images, max(1, SCALED_PASSES // len(masks.unions))), masks=masks)
        by_masks.append({"per_axis": per_axis, "masks": len(masks), "pairs": len(masks.unions), **cost})
    quarters = sorted({max(1, images * part // 4) for part in range(1, 5)})
    return {"masks": by_masks, "images": [subject.certify(count=count)[1] for count in quarters]}


def raw_rates(network: nn.Module, images: Float[Tensor, "b c h w"], engine: Any, *, seconds: float) -> dict[str, float]:
    """Rates of the bare network at the engine's batch size, by precision."""
    size = int(engine.batch_size)
    batch = images.repeat(-(-size // len(images)), 1, 1, 1)[:size]
    precisions = dict.fromkeys(("fp32", engine.fast))
    rates = {name: raw_rate(network, batch, precision=name, seconds=seconds) for name in precisions}
    if engine.compile:
        compiled = raw_rate(network, batch, precision=engine.fast, compiled=True, seconds=seconds)
        rates[f"{engine.fast} compiled"] = compiled
    return rates


def raw_rate(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    precision: Precision,
    compiled: bool = False,
    seconds: float = 1.0,
) -> float:
    """Forward passes per second of the bare network on one batch in memory: no masks, no reading.

    The network is converted to `precision`, in channels-last format, which is faster on GPUs and CPUs alike.
    """
    dtype, device = AUTOCAST.get(precision, torch.float32), images.device
    bare = copy.deepcopy(network).eval().to(dtype).to(memory_format=torch.channels_last)
    batch = images.to(dtype).contiguous(memory_format=torch.channels_last)
    if compiled:
        bare.compile(dynamic=False)
    with torch.inference_mode(), tf32(precision != "fp32"):
        for _ in range(2):
            bare(batch)
        wait(device)
        passes, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            bare(batch)
            passes += len(batch)
            if passes % (4 * len(batch)) == 0:
                wait(device)
        wait(device)
        return passes / (time.perf_counter() - started)


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peer_certify(
    classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], masks: MaskSet
) -> tuple[Bool[Tensor, " b"], int]:
    """Certify as PatchCleanser's scripts do (Xiang et al. 2022); the result and the number of passes.

    Batches of 16 images; one pass of a batch for each pair of masks, without early exit; float32 as torch sets it up,
    gradients on, and each answer fetched at once.
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
    """Predict by double masking the same way: a pass per mask, and for each disagreeing copy one more per mask."""
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
