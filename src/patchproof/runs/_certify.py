"""`certify` and `attack`: one record per image, resumable, on any number of processes."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchproof.attacks import AttackPlan, OnStep
from patchproof.data import Batch, as_source, load_groups, require_workers, spread_indices
from patchproof.defenses import Defense, assess, device_of, require_defense, with_engine
from patchproof.machine import require_free
from patchproof.masking import Audit, Drift, Engine, Evaluator, Measured, Redone, as_images, images_ahead
from patchproof.models import classifier_summary, weights_sha256
from patchproof.runs._attack import Attacker
from patchproof.runs._cost import require_memory
from patchproof.runs._folder import UNREADABLE, RunFolder, checked_prefix, read_manifest, refuse_differences, write_json
from patchproof.runs._manifest import (
    SCHEMA,
    agree,
    changes_since,
    measured_facts,
    network_remarks,
    new_manifest,
    outputs_for,
    preprocessing_facts,
    preprocessing_for,
    require_labels,
    stored_engine,
)
from patchproof.runs._measure import bare_logits, engine_of, measure_tau
from patchproof.runs._record import ACCURACIES, ATTACK_ACCURACIES, AttackFindings, Record, Results, Tally
from patchproof.runs.executors import Executor, default_workers, launched
from patchproof.types import CheckError, InputError, Preprocessing, TauExceededError, kind_of, require_kinds

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
    """Count the images that provably keep their label under any patch of the threat, with one record per image.

    `data` is what `open_dataset` returns, or any sequence of (image, label): PIL images, or float tensors in [0, 1] of
    the input size. τ is measured on the data before anything is certified. With a `folder`, manifest, records and
    results are written there; `resume` continues the run in it with the same defence, weights and data, or begins one.
    `on_record` sees each new record once, and may raise to stop the run. `on_measure` is called just before τ is
    measured, when all settings have been checked. `on_start` gets the tally, which begins with the records in the
    folder and is kept up to date, and the number of images planned.
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
    """Certify images, and attack them with white-box patches: the classifier alone, and the defence adaptively.

    For recovery, certified ≤ attacked ≤ defended. If a patch changes the answer for a certified image, its pixels are
    kept in `folder`/broken. `on_step(step, steps)` is called at each step of each attack. The other arguments are those
    of `certify`.
    """
    require_defense(defense)
    require_kinds(attack, locals())
    options = {name: value for name, value in locals().items() if name not in ("plan", "on_step")}
    return Session(**options, attacker=Attacker(plan or AttackPlan(), on_step)).execute()


@dataclass(frozen=True)
class Done:
    """One evaluated image: its record, the labels that were decided again, and the pixels that an attack keeps."""

    record: Record
    redone: Redone = field(default_factory=Redone)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """The images of one batch, and the batch size of masked copies that fitted into memory."""

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
    """One call of `certify`, or of `attack` if there is an `attacker`."""

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
        self.outputs = None if self.classifier is None else outputs_for(self.source, self.classifier)
        self.team = self.executor or launched()
        self.records: list[Record] = []
        self.tally = Tally(ACCURACIES if self.attacker is None else ATTACK_ACCURACIES)
        self.batch_size: int | None = None
        self.started = time.monotonic()
        self.seconds_before, self.redone = 0.0, Redone()  # totals that include earlier sessions
        # Images per piece. Attacked images come one by one, so that a killed run loses only the one in progress.
        self.size = 1 if self.attacker else int(getattr(self.defense, "images_at_once", IMAGES_AT_ONCE))

    def execute(self) -> Results:
        """Evaluate the images that are left, on any number of processes; the results cover all sessions."""
        with self.team.at_work():
            manifest = self.manifest()
            self.require_labels()
            if self.classifier is not None and manifest["identity"]["weights_sha256"] is None:
                manifest["logits"] = self.first_logits  # a function is known by its answers only
            earlier = None
            if self.place is not None and self.resume and not self.team.rank and self.place.manifest_path.exists():
                earlier = read_manifest(self.place.manifest_path)
                refuse_differences(earlier, manifest, where=self.place.path)
            if self.on_measure is not None:
                self.on_measure()
            measured = self.measure(earlier)
            if measured is not None:
                manifest |= measured_facts(*measured)
            everyone = self.team.gather({key: manifest[key] for key in ("identity", "tau", "batch_size")})
            if self.team.rank:
                shared = self.team.share()
                self.give_engine(None if shared["engine"] is None else Measured(**shared["engine"]))
                for _ in self.team.run(self.work, self.pieces(shared["done"]), Piece.load):
                    pass
                return Results((), self.tally.rates(), {})
            agree(manifest, everyone)
            with (
                nullcontext(manifest) if self.place is None else self.place.open(manifest, resume=self.resume) as stored
            ):
                engine = None
                if measured is not None:
                    explicit = engine_of(self.defense).batch_size != "auto"
                    engine = stored_engine(measured[0], stored, manifest, where=self.path, keep_batch=explicit)
                if self.place is not None:
                    self.recall(self.place)
                self.team.share({"engine": None if engine is None else vars(engine), "done": len(self.records)})
                self.give_engine(engine)
                if self.on_start is not None:
                    self.on_start(self.tally, len(self.indices))
                content = self.finish(manifest)
        return Results(tuple(self.records), self.tally.rates(), content, self.path)

    def manifest(self) -> dict[str, Any]:
        """The manifest before τ is measured; its `identity` may not change when the run is resumed."""
        defense, source, classifier, engine = self.defense, self.source, self.classifier, engine_of(self.defense)
        described = defense.describe()
        if not isinstance(described, Mapping):
            raise InputError(
                f"{type(defense).__name__}.describe must return a mapping of JSON values, not {kind_of(described)}"
            )
        model = None if classifier is None else classifier_summary(classifier)
        threat = {**asdict(defense.threat), "name": defense.name, "guarantee": defense.guarantee}
        identity: dict[str, Any] = {
            "architecture": model and model["architecture"],
            "weights_sha256": None if classifier is None else weights_sha256(classifier),
            "data_sha256": source.listing_sha256(self.indices),
            "images": f"{len(self.indices)} of {len(source)}",
            "preprocessing": preprocessing_facts(self.how),
            "fill": model and model["fill"],
            "device": device_of(defense).type,
            "defense": threat | dict(described),
        }
        if self.attacker is not None:
            identity["attack"] = asdict(self.attacker.plan)
        facts = {
            "guarantee": defense.guarantee,
            "remarks": network_remarks(classifier, identity["data_sha256"]),
            "model": model,
            "data": {
                "name": source.name,
                "split": source.split,
                "images": len(source),
                "class_names": list(source.class_names),
                "low_resolution": source.low_resolution,
            },
        }
        if getattr(defense, "masks", None) is not None:
            facts["masks"] = asdict(defense.masks)
        facts |= {"tau": None, "batch_size": self.size, "precision": engine.precision, "compile": engine.compile}
        command = "certify" if self.attacker is None else "attack"
        return new_manifest(command, self.config, identity, facts | {"processes": self.team.size}, device_of(defense))

    def require_labels(self) -> None:
        """Refuse labels and numbers of classes that the classifier does not have, before time is spent on images."""
        named = len(self.source.class_names)
        classes: int | None = getattr(self.classifier, "num_classes", None)
        if classes is None and self.classifier is not None and self.first_logits:
            classes = len(self.first_logits)
            if named not in (0, classes) and getattr(self.classifier, "class_names", None) is None:
                raise InputError(
                    f"wrong number of classes: {self.source.name} has {named}, the classifier {classes} and no "
                    "class names to match by; give it class_names, or data with its classes"
                )
        require_labels(self.source, self.indices, classes)

    @cached_property
    def first_logits(self) -> list[float]:
        """The classifier's logits of the first image that can be read."""
        batches = load_groups(self.source, self.how, ([index] for index in self.indices), skip_bad=True)
        first = next((batch.images for batch in batches if batch.indices), None)
        device = device_of(self.defense)
        return [] if first is None else bare_logits(self.classifier, as_images(first, device))[0].tolist()

    def measure(self, earlier: Mapping[str, Any] | None) -> tuple[Measured, Drift] | None:
        """Measure τ. `auto` stands for the choice of an earlier session, or else for that of the main process."""
        engine = engine_of(self.defense)
        if "auto" in (engine.precision, engine.compile):
            found, chosen = None, None
            if earlier is not None:
                chosen = {"precision": earlier.get("precision", "fp32"), "compile": bool(earlier.get("compile"))}
            elif not self.team.rank:
                found = measure_tau(self.defense, self.source, self.indices, self.how)
                chosen = found and {"precision": found[0].precision, "compile": found[0].compile}
            chosen = self.team.share(chosen)
            if found is not None or chosen is None:
                return found
            engine = replace(engine, **chosen)
        return measure_tau(self.defense, self.source, self.indices, self.how, engine=engine)

    def recall(self, place: RunFolder) -> None:
        """Read what earlier sessions have left in the folder."""
        self.records = list(checked_prefix(place.records(), self.indices, self.source.path, where=place.path))
        self.tally.add(self.records)
        spent = place.spent(len(self.records))
        with suppress(*UNREADABLE):  # the cost of earlier sessions may be lost
            audit, seconds = spent["audit"], float(spent["cost"]["seconds"])
            self.redone.add(Redone(audit["steps"], float(audit["largest_change"]), audit["shares"]))
            self.seconds_before = seconds

    def give_engine(self, engine: Measured | None) -> None:
        if engine is not None and hasattr(self.defense, "with_engine"):
            self.defense = with_engine(self.defense, engine)

    def pieces(self, done: int) -> range:
        """Numbers of the pieces that are left after `done` images.

        Pieces always begin at the same positions, so the batch of an image, and with it the last digits of its margin,
        do not depend on sessions and processes.
        """
        end = -(-len(self.indices) // self.size)
        return range(done // self.size if done < len(self.indices) else end, end)

    def finish(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate and keep the pieces that are left; results.json is written even if this is interrupted."""
        if len(self.records) == len(self.indices):
            self.started = time.monotonic()  # nothing is left to do, so this session's checks are no cost of the run
        recorded = len(self.records) % self.size  # images of the first piece that are recorded already
        doubt = None
        try:
            for piece in self.answers(self.pieces(len(self.records))):
                self.batch_size = min(self.batch_size or piece.batch_size, piece.batch_size)
                self.keep(piece.images[recorded:])
                recorded = 0
            doubt = changes_since(manifest["identity"]["data_sha256"], self.source)
        except TauExceededError as error:
            if self.place is not None:
                self.place.spoil(str(error))
            raise
        finally:
            content = self.content(manifest["remarks"], doubt)
            if self.place is not None:
                write_json(self.place.path / "results.json", content)
        if doubt is not None:
            if self.place is not None:
                self.place.spoil(doubt)
            raise CheckError(doubt)
        return content

    def answers(self, numbers: range) -> Iterator[Piece]:
        """The executor's answers, each checked to be the piece whose turn it is, before anything in it is counted."""
        found: Any = self.team.run(self.work, numbers, Piece.load)
        for number, answer in zip_longest(numbers, found if isinstance(found, Iterable) else ()):
            planned = () if number is None else self.indices[number * self.size : (number + 1) * self.size]
            if not isinstance(answer, Piece) or [done.record.index for done in answer.images] != list(planned):
                came = "nothing" if answer is None else "another" if isinstance(answer, Piece) else kind_of(answer)
                turn = "after the last piece" if number is None else f"for piece {number}"
                raise CheckError(
                    f"{type(self.team).__name__}.run must yield the answers in the order of the pieces, once each; "
                    f"{turn} came {came}"
                )
            yield answer

    def keep(self, images: Sequence[Done]) -> None:
        """Show and write new records; if `on_record` raises, those that it has seen are written."""
        for done in images:  # pixels are written before the record that refers to them
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
        """Evaluate pieces. A number is taken when its images are about to be decoded, at most one piece ahead."""
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
                known = label if self.outputs is None else int(self.outputs[label])
                empty = dict.fromkeys(getattr(self.defense, "evidence", ()))
                attack = None if self.attacker is None else AttackFindings()
                record = Record(bad.index, bad.path, known, evidence=empty, attack=attack, error=bad.reason)
                done.append(Done(record))
            done.sort(key=lambda one: one.record.index)
            yield claimed.popleft(), Piece(done, 0 if evaluator is None else evaluator.chunk)

    def evaluated(self, batch: Batch, images: Tensor, evaluator: Evaluator | None) -> list[Done]:
        """Answer each image by the bare classifier and by the defence, certify it, and attack it.

        `forwards` counts the masked copies for the defence's answer and certificate together; the unmasked pass of the
        undefended answer is not part of the defence.
        """
        labels = (batch.labels if self.outputs is None else self.outputs[batch.labels]).to(images.device)
        undefended = None
        if evaluator is not None:
            evaluator.audit = Audit()
            undefended = (evaluator.labels(images) == labels).tolist()
        found = assess(self.defense, images, labels).to("cpu")
        proof, right = found.certificates, (found.predictions == labels.cpu()).tolist()
        redone = {} if evaluator is None else evaluator.audit.redone
        evaluated = []
        for row, index in enumerate(batch.indices):
            margin, evidence = float(proof.margin[row]), dict[str, Any]()
            for name, values in proof.evidence.items():  # `witness.label` becomes `label` inside `witness`
                outer, _, inner = name.partition(".")
                if inner:
                    evidence.setdefault(outer, {})[inner] = values[row].tolist()
                else:
                    evidence[outer] = values[row].tolist()
            record = Record(
                index=index,
                path=self.source.path(index),
                label=int(labels[row]),
                undefended=None if undefended is None else undefended[row],
                defended=right[row],
                certified=bool(proof.certified[row]),
                margin=round(margin, 6) if math.isfinite(margin) else None,
                forwards=int(proof.forwards[row]),
                evidence=evidence,
            )
            kept: Mapping[str, Tensor] = {}
            if self.attacker is not None:  # the image is alone in its piece
                record, kept = self.attacker(self.defense, record, images, labels)
            evaluated.append(Done(record, redone.get(row, Redone()), kept))
        return evaluated

    def spent(self) -> dict[str, Any]:
        """What all sessions so far took, in the form of results.json."""
        seconds = round(self.seconds_before + time.monotonic() - self.started, 3)
        audit = {"redone": sum(self.redone.steps.values()), **vars(self.redone)}
        return {"images": {"done": len(self.records)}, "cost": {"seconds": seconds}, "audit": audit}

    def content(self, remarks: Sequence[str], doubt: str | None) -> dict[str, Any]:
        """Build results.json. It is partial if not every image of the data set was evaluated, or the data changed."""
        tally, spent, planned, available = self.tally, self.spent(), len(self.indices), len(self.source)
        bad, good = tally.done - tally.good, max(1, tally.good)
        partial = []
        if planned < available:
            partial.append(f"{planned:,} of {available:,} images were asked for (limit)")
        if tally.done < planned:
            partial.append(f"{tally.done} of {planned} images are done; resume to continue")
        if bad:
            partial.append("1 bad image was skipped" if bad == 1 else f"{bad} bad images were skipped")
        if doubt is not None:
            partial.append(doubt)
        content = {
            "schema": SCHEMA,
            "status": "partial" if partial else "complete",
            "partial": partial,
            "remarks": remarks,
            "defense": self.defense.name,
            "guarantee": self.defense.guarantee,
            "images": {"done": tally.done, "planned": planned, "available": available, "bad": bad},
            **{name: rate.as_dict() for name, rate in tally.rates().items()},
            "cost": {
                "forwards": tally.forwards,
                "forwards_per_image": tally.forwards / good,
                "seconds": spent["cost"]["seconds"],
                "batch_size": self.batch_size,
                "processes": self.team.size,
            },
            "audit": spent["audit"],
        }
        if self.attacker is not None:
            content["cost"] |= {"passes": tally.passes, "passes_per_image": tally.passes / good}
            content["cost"]["queries"] = tally.queries
            content["broken"] = tally.broken
        return content
