"""What certifications and attacks have in common: images in pieces through an executor, records into a folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from patchproof.data import (
    Batch,
    FolderSource,
    ImageSource,
    as_source,
    default_preprocessing,
    load_groups,
    open_class_folders,
    spread_indices,
)
from patchproof.defenses import Defense, assess, device_of
from patchproof.masking import Audit, Engine, Evaluator, Measured, images_ahead
from patchproof.models import match_labels
from patchproof.runs._folder import RunFolder, checked_prefix
from patchproof.runs._manifest import SCHEMA, run_manifest, stored_engine
from patchproof.runs._measure import measure_tau
from patchproof.runs._record import ATTACK, BASE, AttackFindings, Rate, Record, Tally
from patchproof.runs.executors import Executor, launched
from patchproof.types import CheckError, InputError, PatchproofError, Preprocessing, Size, TauExceededError

IMAGES_AT_ONCE = 32
"""Images per call of a defence that does not say how many suit it."""


@dataclass(frozen=True)
class Results:
    """What a run found; `content` is what results.json says. On processes that do not write, there are no records."""

    records: tuple[Record, ...]
    rates: Mapping[str, Rate]
    content: Mapping[str, Any]
    folder: Path | None = None

    @property
    def undefended(self) -> Rate:
        """The classifier alone, on clean images."""
        return self.rates["undefended"]

    @property
    def defended(self) -> Rate:
        """The defence, on clean images."""
        return self.rates["defended"]

    @property
    def certified(self) -> Rate:
        """Under every patch of the threat, provably."""
        return self.rates["certified"]


@dataclass(frozen=True)
class Break:
    """A certified image and the patch under which the defence answers otherwise: a counterexample to the proof."""

    index: int
    image: Tensor
    patched: Tensor


@dataclass(frozen=True)
class Piece:
    """Some images done: their records and the lines these become, serialised once; what float32 decided again of each;
    the batch size that fitted; and certificates that fell."""

    records: Sequence[Record]
    lines: Sequence[bytes]
    audit: Sequence[tuple[int, float]]
    batch_size: int
    breaks: Sequence[Break] = ()

    def dump(self) -> str:
        values = vars(self) | {"lines": [line.decode() for line in self.lines], "records": None}
        breaks = [{"index": b.index, "image": b.image.tolist(), "patched": b.patched.tolist()} for b in self.breaks]
        return json.dumps(values | {"breaks": breaks})

    @classmethod
    def load(cls, text: str) -> Piece:
        values = json.loads(text)
        lines = [line.encode() for line in values["lines"]]
        breaks = [Break(b["index"], torch.tensor(b["image"]), torch.tensor(b["patched"])) for b in values["breaks"]]
        audit = [(count, change) for count, change in values["audit"]]
        return cls([Record.parse(line) for line in values["lines"]], lines, audit, values["batch_size"], breaks)


@dataclass
class Nowhere:
    """A folder that keeps nothing."""

    path: Path | None = None

    @contextlib.contextmanager
    def open(self, manifest: Mapping[str, Any], *, resume: bool) -> Iterator[Mapping[str, Any]]:
        yield manifest

    def each_record(self) -> Iterator[Record]:
        yield from ()

    def append(self, lines: Sequence[bytes]) -> None:
        pass

    def results(self) -> None:
        return None

    def write_results(self, results: Mapping[str, Any]) -> None:
        pass

    def spoil(self, reason: str) -> NoReturn:
        raise CheckError(reason)


@dataclass
class Session:
    """One call of `certify` or `attack`. `names` are the accuracies that are counted; `evaluate` may go on with the
    records of a batch; `plan` describes it in the manifest."""

    command: str
    names: Sequence[str]
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
    on_start: Callable[[Tally, int], None] | None
    config: Mapping[str, Any] | None
    plan: Mapping[str, Any] | None = None
    evaluate: Callable[[Any, Sequence[Record], Tensor, Tensor], tuple[list[Record], list[Break]]] | None = None
    on_break: Callable[[Path, Break, Record, Any], object] | None = None
    images_at_once: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.defense, Defense):
            needed = ("name", "guarantee", "threat", "predict", "certify", "describe")
            raise InputError(
                f"{type(self.defense).__name__} is no defence: it lacks "
                f"{', '.join(name for name in needed if not hasattr(self.defense, name))}; e.g. "
                'pp.defense("patchcleanser", classifier, threat)'
            )
        self.source = as_source(self.data)
        self.indices = spread_indices(self.source, self.limit)
        self.classifier = getattr(self.defense, "classifier", None)
        size = self.defense.threat.image_size
        self.how = self.preprocessing or preprocessing_for(self.classifier, self.source.low_resolution, size)
        self.place = Nowhere() if self.folder is None else RunFolder(Path(self.folder))
        self.team = self.executor or launched()

    def execute(self) -> Results:
        """Do what is not done yet; the results cover all of it."""
        with self.team.at_work():
            return self._execute()

    def _execute(self) -> Results:
        started = time.monotonic()
        measured = measure_tau(self.defense, self.source, self.indices, self.how)
        listed = self.source.listing_sha256(self.indices)
        current = run_manifest(
            self.command,
            self.defense,
            self.source,
            images=f"{len(self.indices)} of {len(self.source)}",
            data_sha256=listed,
            preprocessing=self.how,
            device=device_of(self.defense),
            measured=measured,
            batch_size=self.size if measured is None else int(measured[0].batch_size),
            processes=self.team.size,
            config=self.config or {},
            plan=self.plan,
        )
        everyone = self.team.gather({key: current[key] for key in ("identity", "tau", "batch_size")})
        if self.team.rank:
            go = self.team.share()
            self.give_engine(None if go["engine"] is None else Measured(**go["engine"]))
            for _ in self.team.run(self._work, self.pieces(go["done"]), Piece.load):
                pass
            return Results((), Tally(self.names).rates(), {})
        agree(current, everyone)
        with self.place.open(current, resume=self.resume) as stored:
            engine = None
            if measured is not None:
                asked = getattr(self.defense, "engine", None) or Engine()
                where, explicit = self.place.path or Path(), asked.batch_size != "auto"
                engine = stored_engine(measured[0], stored, current, where=where, keep_batch=explicit)
            found = checked_prefix(self.place.each_record(), self.indices, self.source.path, where=self.place.path)
            records = list(found)
            tally = Tally(self.names).add(records)
            cost = Cost.so_far(self.place.results())
            self.team.share({"engine": None if engine is None else vars(engine), "done": len(records)})
            self.give_engine(engine)
            if self.on_start is not None:
                self.on_start(tally, len(self.indices))
            doubts: list[str] = []
            begun = len(records) % self.size
            try:
                for piece in self.team.run(self._work, self.pieces(len(records)), Piece.load):
                    self.keep(piece, begun, records, tally, cost)
                    begun = 0
                doubts = changes_since(listed, self.source)
            except TauExceededError as error:
                self.place.spoil(str(error))
            finally:
                cost.seconds = cost.before + time.monotonic() - started
                content = self.content(tally, cost, doubts)
                self.place.write_results(content)
            for doubt in doubts:
                self.place.spoil(doubt)
        return Results(tuple(records), tally.rates(), content, self.place.path)

    def keep(self, piece: Piece, begun: int, records: list[Record], tally: Tally, cost: Cost) -> None:
        """Show and write the records of a piece from `begun` on. If `on_record` raises, those it has seen are written;
        the others will be done, and seen, when the run is resumed."""
        fresh = piece.records[begun:]
        for found in piece.breaks:  # on disk before the record that speaks of it
            of = next((record for record in fresh if record.index == found.index), None)
            if of is not None and self.on_break is not None and self.place.path is not None:
                self.on_break(self.place.path, found, of, self.defense)
        seen = 0
        try:
            for record in fresh:
                seen += 1
                records.append(record)
                tally.add([record])
                if self.on_record is not None:
                    self.on_record(record)
        finally:
            cost.add(piece, begun, begun + seen)
            self.place.append(piece.lines[begun : begun + seen])

    def give_engine(self, engine: Measured | None) -> None:
        if engine is not None and hasattr(self.defense, "with_engine"):
            self.defense = self.defense.with_engine(engine)

    @property
    def size(self) -> int:
        """Images in a piece."""
        return self.images_at_once or int(getattr(self.defense, "images_at_once", IMAGES_AT_ONCE))

    def pieces(self, done: int) -> range:
        """Pieces always begin at the same positions, so that an image has the same batch, and the same last digits, in
        any session and on any number of processes."""
        end = -(-len(self.indices) // self.size)
        return range(done // self.size if done < len(self.indices) else end, end)

    def _work(self, numbers: Iterator[int]) -> Iterator[tuple[int, Piece]]:
        """The pieces of these numbers, each asked for when it is about to be read, at most one ahead."""
        size, claimed = self.size, deque[int]()
        evaluator: Evaluator | None = getattr(self.defense, "evaluator", None)
        if evaluator is None and self.classifier is not None:
            evaluator = Evaluator(self.classifier, Engine())
        classes = None
        if self.source.class_names and self.classifier is not None:
            classes = torch.tensor(match_labels(self.source.class_names, self.classifier))

        def groups() -> Iterator[Sequence[int]]:
            for number in numbers:
                claimed.append(number)
                yield self.indices[number * size : (number + 1) * size]

        workers = self.workers or default_workers()
        batches = load_groups(self.source, self.how, groups(), workers=workers, skip_bad=self.skip_bad, ahead=0)
        for batch, images in images_ahead(((b, b.images) for b in batches), device_of(self.defense)):
            yield claimed.popleft(), self._piece(batch, images, evaluator, classes)

    def _piece(self, batch: Batch, images: Tensor, evaluator: Evaluator | None, classes: Tensor | None) -> Piece:
        records: list[Record] = []
        breaks: list[Break] = []
        audits: dict[int, tuple[int, float]] = {}
        if batch.indices:
            labels = (batch.labels if classes is None else classes[batch.labels]).to(images.device)
            if int(labels.min()) < 0:
                raise InputError(
                    f"labels cannot be negative: image {batch.indices[int(labels.argmin())]} has one that is"
                )
            paths = [self.source.path(index) for index in batch.indices]
            if evaluator is not None:
                evaluator.audit = Audit()
            records = certified_records(self.defense, evaluator, images, labels, batch.indices, paths)
            if evaluator is not None:
                audits = dict(zip(batch.indices, evaluator.audit.per_image(len(images)), strict=True))
            if self.evaluate is not None:
                records, breaks = self.evaluate(self.defense, records, images, labels)
        for bad in batch.bad:
            label = int(self.source.labels[bad.index])
            empty = dict.fromkeys(getattr(self.defense, "evidence", ()))
            attack = None if self.plan is None else AttackFindings()
            known = label if classes is None else int(classes[label])
            records.append(Record(bad.index, bad.path, known, evidence=empty, attack=attack, error=bad.reason))
        records.sort(key=lambda record: record.index)
        lines = [record.line().encode() for record in records]
        audit = [audits.get(record.index, (0, 0.0)) for record in records]
        return Piece(records, lines, audit, 0 if evaluator is None else evaluator.chunk, breaks)

    def content(self, tally: Tally, cost: Cost, doubts: Sequence[str]) -> dict[str, Any]:
        """results.json. Partial: not every image of the data set has been evaluated, or `doubts`."""
        planned, available, bad = len(self.indices), len(self.source), tally.done - tally.good
        partial = [f"{planned} of {available} images were asked for (limit)"] if planned < available else []
        if tally.done < planned:
            partial.append(f"{tally.done} of {planned} images are done; resume to continue")
        if bad:
            partial.append(f"{bad} bad images were skipped")
        good = max(1, tally.good)
        attack = (
            {}
            if self.plan is None
            else {"passes": tally.passes, "passes_per_image": tally.passes / good, "queries": tally.queries}
        )
        return {
            "schema": SCHEMA,
            "status": "partial" if partial or doubts else "complete",
            "partial": [*partial, *doubts],
            "defense": self.defense.name,
            "guarantee": self.defense.guarantee,
            "images": {"done": tally.done, "planned": planned, "available": available, "bad": bad},
            **{name: rate.as_dict() for name, rate in tally.rates().items()},
            "cost": {
                "forwards": tally.forwards,
                "forwards_per_image": tally.forwards / good,
                "seconds": round(cost.seconds, 3),
                "batch_size": cost.batch_size,
                "processes": self.team.size,
                **attack,
            },
            "audit": {"redone": cost.redone, "largest_change": cost.largest_change},
            **({} if self.plan is None else {"broken": tally.broken}),
        }


@dataclass
class Cost:
    """What a run took besides passes, over all its sessions and processes."""

    before: float = 0.0
    redone: int = 0
    largest_change: float = 0.0
    batch_size: int | None = None
    seconds: float = 0.0

    @classmethod
    def so_far(cls, results: Mapping[str, Any] | None) -> Cost:
        """Of earlier sessions of this run, as far as they could write it down."""
        try:
            found = results or {}
            audit = found["audit"]
            return cls(float(found["cost"]["seconds"]), int(audit["redone"]), float(audit["largest_change"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()

    def add(self, piece: Piece, begun: int, end: int) -> None:
        """The images from `begun` to `end`: those before were counted when first done, those after will be."""
        for count, change in piece.audit[begun:end]:
            self.redone += count
            self.largest_change = max(self.largest_change, change)
        self.batch_size = min(self.batch_size or piece.batch_size, piece.batch_size)


def certified_records(
    defense: Defense,
    evaluator: Evaluator | None,
    images: Tensor,
    labels: Tensor,
    indices: Sequence[int],
    paths: Sequence[str],
) -> list[Record]:
    """Undefended (by the bare classifier), defended and certified, for each image of a batch.

    `forwards` counts the masked copies that the answer and the certificate took together; the one unmasked pass of the
    undefended answer is not part of the defence.
    """
    undefended = None if evaluator is None else (evaluator.labels(images) == labels).tolist()
    found = assess(defense, images, labels).to("cpu")
    proof, right = found.certificates, (found.predictions == labels.cpu()).tolist()
    taken = {name.partition(".")[0] for name in proof.evidence} & {*BASE, *ATTACK, "error"}
    if taken:
        raise InputError(f"evidence cannot be called {min(taken)!r}: that is a field of every record")
    return [
        Record(
            index=index,
            path=paths[row],
            label=int(labels[row]),
            undefended=None if undefended is None else undefended[row],
            defended=right[row],
            certified=bool(proof.certified[row]),
            margin=round(margin, 6) if math.isfinite(margin := float(proof.margin[row])) else None,
            forwards=int(proof.forwards[row]),
            evidence=nested({name: values[row].tolist() for name, values in proof.evidence.items()}),
        )
        for row, index in enumerate(indices)
    ]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`witness.label` becomes `label` inside `witness`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return found


def preprocessing_for(classifier: Any, low_resolution: bool, image_size: Size) -> Preprocessing:
    """How images of any size become the input of this classifier."""
    return default_preprocessing(
        low_resolution,
        image_size,
        interpolation=getattr(classifier, "interpolation", "bicubic"),
        crop_pct=getattr(classifier, "crop_pct", 1.0),
    )


def default_workers() -> int:
    """Threads that decode images: one per core, at most 16, shared among the processes of the machine."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(16, (os.cpu_count() or 2) // max(1, int(processes) if processes.isdigit() else 1)))


def changes_since(listing_sha256: str, source: ImageSource) -> list[str]:
    """What to say if a folder of images lists other paths, labels or file sizes than it did; data in memory cannot."""
    if not isinstance(source, FolderSource):
        return []
    again = "put the files back as they were and begin again in another folder"
    try:
        now = open_class_folders(
            source.root, name=source.name, split=source.split, low_resolution=source.low_resolution
        ).listing_sha256()
    except (PatchproofError, OSError) as error:
        return [f"the data set changed during the run ({error}); {again}"]
    return [] if now == listing_sha256 else [f"the data set changed during the run; {again}"]


def agree(current: dict[str, Any], everyone: Sequence[Mapping[str, Any]]) -> None:
    """Every process sees the same weights, images and settings; the largest τ and the smallest chunk hold for all."""
    for rank, theirs in enumerate(everyone):
        different = [key for key, value in current["identity"].items() if theirs["identity"].get(key) != value]
        if different:
            raise CheckError(
                f"process {rank} of {len(everyone)} has another {different[0]}: "
                f"{theirs['identity'].get(different[0])} instead of {current['identity'][different[0]]}; give every "
                "machine the same files"
            )
        if current["tau"] is not None:
            for kind in ("fast", "fp32"):
                current["tau"][kind] = max(current["tau"][kind], theirs["tau"][kind])
        current["batch_size"] = min(current["batch_size"], theirs["batch_size"])
