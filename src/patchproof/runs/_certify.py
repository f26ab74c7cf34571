"""Certifications and attacks: one record per image, resumable, on any number of processes."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchproof.attacks import AttackPlan, OnStep
from patchproof.data import (
    BadImageError,
    Batch,
    as_source,
    iterate_batches,
    load_groups,
    require_workers,
    spread_indices,
)
from patchproof.defenses import Defense, assess, device_of, require_defense
from patchproof.masking import (
    Audit,
    Drift,
    Engine,
    Evaluator,
    Measured,
    Redone,
    as_images,
    evaluating,
    images_ahead,
    show,
)
from patchproof.models import classifier_summary, match_labels, weights_sha256
from patchproof.runs._attack import Attacker
from patchproof.runs._cost import require_memory
from patchproof.runs._folder import (
    UNREADABLE,
    RunFolder,
    checked_prefix,
    dump_json,
    read_manifest,
    refuse_differences,
    write_atomically,
)
from patchproof.runs._manifest import (
    SCHEMA,
    agree,
    changes_since,
    network_remarks,
    new_manifest,
    plain,
    preprocessing_facts,
    preprocessing_for,
    stored_engine,
)
from patchproof.runs._measure import measure_tau
from patchproof.runs._record import (
    ACCURACIES,
    ATTACK,
    ATTACK_ACCURACIES,
    BASE,
    AttackFindings,
    Record,
    Results,
    Tally,
    nested,
)
from patchproof.runs.executors import Executor, default_workers, launched
from patchproof.types import CheckError, InputError, Preprocessing, TauExceededError, require_free, require_kinds

IMAGES_AT_ONCE = 32
"""Images per call of a defence without `images_at_once`."""


def certify(
    defense: Defense,
    data: Any,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    executor: Executor | None = None,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    on_measure: Callable[[], None] | None = None,
    on_start: Callable[[Tally, int], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Results:
    """Count the images that provably keep their label under any patch of the threat, and record each.

    `data` is what `open_dataset` returns, or any sequence of (image, label): PIL images, or float tensors in [0, 1] of
    the input size. τ is measured on the data before anything is certified. With a `folder`, manifest, records and
    results are written there; `resume` continues what is there with the same defence, weights and data, or begins.
    `on_record` sees each new record once, and may raise to stop the run; `on_measure` is called when τ is about to be
    measured, with nothing left to refuse; `on_start` sees the tally of the records found in the folder and the number
    planned.
    """
    require_defense(defense)
    require_kinds(certify, locals())
    return Session(**locals()).execute()


def attack(
    defense: Defense,
    data: Any,
    plan: AttackPlan | None = None,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_step: OnStep | None = None,
    executor: Executor | None = None,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    on_measure: Callable[[], None] | None = None,
    on_start: Callable[[Tally, int], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Results:
    """Certify images and attack them with patches, white-box, on the classifier and adaptively on the defence.

    For recovery, certified ≤ attacked ≤ defended. A certified image whose answer a patch changes is kept in
    `folder`/broken with its pixels. `on_step(step, steps)` sees each step of each attack. Everything else is as in
    `certify`.
    """
    require_defense(defense)
    require_kinds(attack, locals())
    options = {name: value for name, value in locals().items() if name not in ("plan", "on_step")}
    return Session(**options, attacker=Attacker(plan or AttackPlan(), on_step)).execute()


@dataclass(frozen=True)
class Done:
    """One image: its record, the labels that were decided again, and the pixels that an attack keeps of it."""

    record: Record
    redone: Redone = field(default_factory=Redone)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Images of one batch, and the batch size of masked copies that fitted into memory."""

    images: Sequence[Done]
    batch_size: int

    def dump(self) -> str:
        images = []
        for done in self.images:
            kept = {name: pixels.tolist() for name, pixels in done.kept.items()}
            images.append((done.record.line(), vars(done.redone), kept))
        return json.dumps([images, self.batch_size])

    @classmethod
    def load(cls, text: str) -> Piece:
        images, batch_size = json.loads(text)
        done = []
        for line, redone, kept in images:
            pixels = {name: torch.tensor(values) for name, values in kept.items()}
            done.append(Done(Record.parse(line), Redone(**redone), pixels))
        return cls(done, batch_size)


@dataclass
class Session:
    """One call of `certify`, or with an `attacker` of `attack`."""

    defense: Any
    data: Any
    folder: Path | str | None
    resume: bool
    limit: int | None
    on_record: Callable[[Record], None] | None
    executor: Executor | None
    preprocessing: Preprocessing | None
    workers: int | None
    skip_bad: bool
    on_measure: Callable[[], None] | None
    on_start: Callable[[Tally, int], None] | None
    config: Mapping[str, Any] | None
    attacker: Attacker | None = None

    def __post_init__(self) -> None:
        self.path = None if self.folder is None else Path(self.folder)
        self.place = None if self.path is None else RunFolder(self.path)
        require_free(self.path, resume=self.resume)
        require_workers(self.workers)
        self.source = as_source(self.data)
        self.indices = spread_indices(self.source, self.limit)
        self.classifier = getattr(self.defense, "classifier", None)
        size = self.defense.threat.image_size
        self.how = self.preprocessing or preprocessing_for(self.classifier, self.source.low_resolution, size)
        require_memory(self.defense)
        self.classes = None
        if self.source.class_names and self.classifier is not None:
            self.classes = torch.tensor(match_labels(self.source.class_names, self.classifier, self.source.name))
        self.team = self.executor or launched()
        self.tally = Tally(ACCURACIES if self.attacker is None else ATTACK_ACCURACIES)
        self.records: list[Record] = []
        self.started, self.seconds_before, self.redone = time.monotonic(), 0.0, Redone()  # of earlier sessions too
        self.remarks: list[str] = []
        self.batch_size: int | None = None

    def execute(self) -> Results:
        """Evaluate what is left, whoever does it; the results cover all sessions."""
        with self.team.at_work():
            identity = self.identity()
            self.require_labels()
            if self.resume and self.place is not None and self.place.manifest_path.exists() and not self.team.rank:
                same = {"schema": SCHEMA, "command": self.command, "identity": plain(identity)}
                refuse_differences(read_manifest(self.place.manifest_path), same, where=self.place.path)
            if self.on_measure is not None:
                self.on_measure()
            measured = self.measure()
            current = self.manifest(identity, measured)
            everyone = self.team.gather({key: current[key] for key in ("identity", "tau", "batch_size")})
            if self.team.rank:
                go = self.team.share()
                self.give_engine(None if go["engine"] is None else Measured(**go["engine"]))
                for _ in self.team.run(self.work, self.pieces(go["done"]), Piece.load):
                    pass
                return Results((), self.tally.rates(), {})
            agree(current, everyone)
            with nullcontext(current) if self.place is None else self.place.open(current, resume=self.resume) as stored:
                engine = None
                if measured is not None:
                    asked = getattr(self.defense, "engine", None) or Engine()
                    where, explicit = self.path or Path(), asked.batch_size != "auto"
                    engine = stored_engine(measured[0], stored, current, where=where, keep_batch=explicit)
                if self.place is not None:
                    found = checked_prefix(self.place.records(), self.indices, self.source.path, where=self.place.path)
                    self.records = list(found)
                    self.tally.add(self.records)
                    spent = self.place.spent(len(self.records))
                    with suppress(*UNREADABLE):
                        before, seconds = spent["audit"], float(spent["cost"]["seconds"])
                        self.redone.add(Redone(before["steps"], float(before["largest_change"]), before["shares"]))
                        self.seconds_before = seconds
                self.team.share({"engine": None if engine is None else vars(engine), "done": len(self.records)})
                self.give_engine(engine)
                if self.on_start is not None:
                    self.on_start(self.tally, len(self.indices))
                doubt, begun = None, len(self.records) % self.size
                try:
                    for piece in self.team.run(self.work, self.pieces(len(self.records)), Piece.load):
                        self.batch_size = min(self.batch_size or piece.batch_size, piece.batch_size)
                        self.keep(piece.images[begun:])
                        begun = 0
                    doubt = changes_since(current["identity"]["data_sha256"], self.source)
                except TauExceededError as error:
                    if self.place is not None:
                        self.place.spoil(str(error))
                    raise
                finally:  # results.json, however it ends
                    content = self.content(doubt)
                    if self.path is not None:
                        write_atomically(self.path / "results.json", dump_json(content))
                if doubt is not None and self.place is not None:
                    self.place.spoil(doubt)
                if doubt is not None:
                    raise CheckError(doubt)
                return Results(tuple(self.records), self.tally.rates(), content, self.path)

    def measure(self) -> tuple[Measured, Drift] | None:
        """τ, and what `auto` stands for: what it did in an earlier session, or what the main process finds."""
        measure = partial(measure_tau, self.defense, self.source, self.indices, self.how)
        asked = getattr(self.defense, "engine", None) or Engine()
        if "auto" not in (asked.precision, asked.compile):
            return measure()
        found, chosen = None, None
        if self.team.rank == 0:
            path = None if self.place is None else self.place.manifest_path
            if self.resume and path is not None and path.exists():
                stored = read_manifest(path)
                chosen = {"precision": stored.get("precision", "fp32"), "compile": bool(stored.get("compile"))}
            else:
                found = measure()
                chosen = found and {"precision": found[0].precision, "compile": found[0].compile}
        chosen = self.team.share(chosen)
        return found or (chosen and measure(engine=replace(asked, **chosen)))

    @property
    def command(self) -> str:
        return "certify" if self.attacker is None else "attack"

    def require_labels(self) -> None:
        """Refuse an image with a label that is none, before time is spent on the others."""
        classes: int | None = len(self.source.class_names) or getattr(self.classifier, "num_classes", None)
        if classes is None and self.classifier is not None:
            batches = iterate_batches(self.source, self.how, self.indices, batch_size=1, skip_bad=True)
            first = next((batch.images for batch in batches if batch.indices), None)
            if first is not None:
                with torch.no_grad(), evaluating(self.classifier):
                    classes = show(self.classifier, as_images(first, device_of(self.defense)), None).shape[1]
        known = "cannot be negative" if classes is None else f"are 0 to {classes - 1}"
        for index in self.indices:
            label = self.source.labels[index]
            if label < 0 or (classes is not None and label >= classes):
                with suppress(BadImageError):  # the label of one that cannot be read is not known
                    self.source.load(index)
                    raise InputError(f"image {index} has the label {label}; labels {known}")

    def identity(self) -> dict[str, Any]:
        """What the records depend on: it may not change when the run is resumed."""
        defense, source = self.defense, self.source
        model = None if self.classifier is None else classifier_summary(self.classifier)
        threat = {**asdict(defense.threat), "name": defense.name, "guarantee": defense.guarantee}
        return {
            "architecture": model and model["architecture"],
            "weights_sha256": None if self.classifier is None else weights_sha256(self.classifier),
            "data_sha256": source.listing_sha256(self.indices),
            "images": f"{len(self.indices)} of {len(source)}",
            "preprocessing": preprocessing_facts(self.how),
            "fill": model and model["fill"],
            "device": device_of(defense).type,
            "defense": threat | defense.describe(),
            **({} if self.attacker is None else {"attack": asdict(self.attacker.plan)}),
        }

    def manifest(self, identity: Mapping[str, Any], measured: tuple[Measured, Drift] | None) -> dict[str, Any]:
        defense, source, device = self.defense, self.source, device_of(self.defense)
        masks = getattr(defense, "masks", None)
        tau: dict[str, Any] | None = None
        engine = getattr(defense, "engine", None) or Engine()
        if measured is not None:
            engine, drift = measured
            between = drift.tau("tf32") if "tf32" in drift.changes else None
            tau = {"fast": engine.tau, "tf32": engine.tau_tf32, "fp32": engine.tau_fp32, "tf32_measured": between}
            tau |= {"drift": asdict(drift) | {"bound": drift.bound}}
        self.remarks = network_remarks(self.classifier, identity["data_sha256"])
        facts = {
            "guarantee": defense.guarantee,
            "remarks": self.remarks,
            "model": None if self.classifier is None else classifier_summary(self.classifier),
            "data": {
                "name": source.name,
                "split": source.split,
                "images": len(source),
                "class_names": list(source.class_names),
                "low_resolution": source.low_resolution,
            },
            **({} if masks is None else {"masks": asdict(masks)}),
            "tau": tau,
            "batch_size": self.size if measured is None else int(measured[0].batch_size),
            "precision": engine.precision,
            "compile": engine.compile,
            "processes": self.team.size,
        }
        return new_manifest(self.command, self.config, identity, facts, device)

    def give_engine(self, engine: Measured | None) -> None:
        if engine is not None and hasattr(self.defense, "with_engine"):
            self.defense = self.defense.with_engine(engine)

    @property
    def size(self) -> int:
        """Images in a piece. Each is attacked alone, so that a killed run loses the one it was at."""
        if self.attacker is not None:
            return 1
        return int(getattr(self.defense, "images_at_once", IMAGES_AT_ONCE))

    def pieces(self, done: int) -> range:
        """Pieces always start at the same positions, so the batch of an image, and with it the last digits, are
        independent of sessions and processes."""
        end = -(-len(self.indices) // self.size)
        return range(done // self.size if done < len(self.indices) else end, end)

    def keep(self, images: Sequence[Done]) -> None:
        """Show and write new records. If `on_record` raises, those it has seen are written; the others are evaluated
        and shown when the run is resumed."""
        for done in images:  # on disk before the record that speaks of it
            if done.kept and self.attacker is not None and self.place is not None:
                self.attacker.save(self.place.path, self.defense, done.record, done.kept)
        lines: list[bytes] = []
        try:
            for done in images:
                lines.append(done.record.line().encode())
                self.records.append(done.record)
                self.tally.add([done.record])
                self.redone.add(done.redone)
                if self.on_record is not None:
                    self.on_record(done.record)
        finally:
            if self.place is not None:
                self.place.append(lines, self.spent())

    def work(self, numbers: Iterator[int]) -> Iterator[tuple[int, Piece]]:
        """Pieces by number. A number is taken when its images are about to be decoded, at most one piece ahead."""
        size, claimed = self.size, deque[int]()
        evaluator: Evaluator | None = getattr(self.defense, "evaluator", None)
        if evaluator is None and self.classifier is not None:
            evaluator = Evaluator(self.classifier, Engine())

        def groups() -> Iterator[Sequence[int]]:
            for number in numbers:
                claimed.append(number)
                yield self.indices[number * size : (number + 1) * size]

        workers = self.workers or default_workers()
        batches = load_groups(self.source, self.how, groups(), workers=workers, skip_bad=self.skip_bad, ahead=0)
        for batch, images in images_ahead(((b, b.images) for b in batches), device_of(self.defense)):
            done = self.evaluated(batch, images, evaluator) if batch.indices else []
            for bad in batch.bad:
                label = int(self.source.labels[bad.index])
                known = label if self.classes is None else int(self.classes[label])
                empty = dict.fromkeys(getattr(self.defense, "evidence", ()))
                attack = None if self.attacker is None else AttackFindings()
                record = Record(bad.index, bad.path, known, evidence=empty, attack=attack, error=bad.reason)
                done.append(Done(record))
            done.sort(key=lambda one: one.record.index)
            yield claimed.popleft(), Piece(done, 0 if evaluator is None else evaluator.chunk)

    def evaluated(self, batch: Batch, images: Tensor, evaluator: Evaluator | None) -> list[Done]:
        """Undefended (by the bare classifier), defended and certified, for each image of a batch; then attacked.

        `forwards` counts the masked copies that the answer and the certificate took together; the one unmasked pass of
        the undefended answer is not part of the defence.
        """
        labels = (batch.labels if self.classes is None else self.classes[batch.labels]).to(images.device)
        undefended = None
        if evaluator is not None:
            evaluator.audit = Audit()
            undefended = (evaluator.labels(images) == labels).tolist()
        found = assess(self.defense, images, labels).to("cpu")
        proof, right = found.certificates, (found.predictions == labels.cpu()).tolist()
        taken = {name.partition(".")[0] for name in proof.evidence} & {*BASE, *ATTACK, "error"}
        if taken:
            raise InputError(f"evidence cannot be called {min(taken)!r}: that is a field of every record")
        redone = {} if evaluator is None else evaluator.audit.redone
        records = [
            Record(
                index=index,
                path=self.source.path(index),
                label=int(labels[row]),
                undefended=None if undefended is None else undefended[row],
                defended=right[row],
                certified=bool(proof.certified[row]),
                margin=round(margin, 6) if math.isfinite(margin := float(proof.margin[row])) else None,
                forwards=int(proof.forwards[row]),
                evidence=nested({name: values[row].tolist() for name, values in proof.evidence.items()}),
            )
            for row, index in enumerate(batch.indices)
        ]
        if self.attacker is None:
            return [Done(record, redone.get(row, Redone())) for row, record in enumerate(records)]
        record, kept = self.attacker(self.defense, records[0], images, labels)  # alone in its piece
        return [Done(record, redone.get(0, Redone()), kept)]

    def spent(self) -> dict[str, Any]:
        """The part of results.json that only those who did the work know, of all sessions so far."""
        tally, good = self.tally, max(1, self.tally.good)
        attack = {"passes": tally.passes, "passes_per_image": tally.passes / good, "queries": tally.queries}
        return {
            "images": {
                "done": tally.done,
                "planned": len(self.indices),
                "available": len(self.source),
                "bad": tally.done - tally.good,
            },
            "cost": {
                "forwards": tally.forwards,
                "forwards_per_image": tally.forwards / good,
                "seconds": round(self.seconds_before + time.monotonic() - self.started, 3),
                "batch_size": self.batch_size,
                "processes": self.team.size,
                **({} if self.attacker is None else attack),
            },
            "audit": {"redone": sum(self.redone.steps.values()), **vars(self.redone)},
        }

    def content(self, doubt: str | None) -> dict[str, Any]:
        """results.json. Partial: not every image of the data set has been evaluated, or the data changed."""
        spent = self.spent()
        done, planned, available, bad = spent["images"].values()
        partial = [f"{planned:,} of {available:,} images were asked for (limit)"] if planned < available else []
        if done < planned:
            partial.append(f"{done} of {planned} images are done; resume to continue")
        if bad:
            partial.append(f"{bad} bad image{'s were' if bad > 1 else ' was'} skipped")
        if doubt is not None:
            partial.append(doubt)
        return {
            "schema": SCHEMA,
            "status": "partial" if partial else "complete",
            "partial": partial,
            "remarks": self.remarks,
            "defense": self.defense.name,
            "guarantee": self.defense.guarantee,
            "images": spent["images"],
            **{name: rate.as_dict() for name, rate in self.tally.rates().items()},
            **spent,
            **({} if self.attacker is None else {"broken": self.tally.broken}),
        }
