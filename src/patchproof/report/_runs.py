"""Run folders as they are found: read without touching them, and with every doubt said.

Every number comes from records.jsonl (or log.jsonl); results.json is only compared with it, but for the time taken.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from patchproof.data import evenly_spread
from patchproof.records import (
    ACCURACIES,
    ATTACK_ACCURACIES,
    SCHEMA,
    AttackRecord,
    Rate,
    Record,
    Tally,
    parse_record,
    rates,
)
from patchproof.report._facts import Facts, label_names, look, missing_facts, read_facts
from patchproof.report._lines import json_object, read_lines, read_sums
from patchproof.report._text import count_words, printable
from patchproof.types import InputError


@dataclass(frozen=True)
class CertifyRun:
    """What `patchproof certify` or `attack` left: at most one record an image, and what is doubtful about them."""

    folder: Path
    name: str
    facts: Facts
    records: tuple[Record, ...]
    class_names: Mapping[int, str]
    seconds: float | None
    notices: tuple[str, ...]

    @cached_property
    def good(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.error is None)

    @cached_property
    def rates(self) -> dict[str, Rate]:
        return rates(self.good)

    @cached_property
    def attacks(self) -> tuple[AttackRecord, ...]:
        """The records that say what attacks did; none of a run of `certify`."""
        return tuple(record for record in self.good if isinstance(record, AttackRecord))

    def class_name(self, label: int) -> str:
        return self.class_names.get(label, f"class {label}")


@dataclass(frozen=True)
class Epoch:
    """Validation after one epoch of training."""

    epoch: int
    step: int
    undefended: Rate
    certified: Rate


@dataclass(frozen=True)
class TrainRun:
    """What `patchproof train` left: a loss a step, and validation accuracies an epoch."""

    folder: Path
    name: str
    manifest: Mapping[str, Any]
    losses: tuple[tuple[int, float], ...]
    epochs: tuple[Epoch, ...]
    seconds: float | None
    notices: tuple[str, ...]

    @property
    def strategy(self) -> str | None:
        value = look(self.manifest, "identity", "plan", "strategy")
        return printable(value) if isinstance(value, str) else None

    @property
    def search_passes(self) -> int | None:
        return search_passes(self.manifest)

    @property
    def best(self) -> Epoch | None:
        """The epoch that `checkpoint-best` holds: most certified, then most right, the first of equals."""
        return max(self.epochs, key=lambda e: (e.certified.k, e.undefended.k, -e.epoch), default=None)


def search_passes(manifest: Mapping[str, Any]) -> int | None:
    """Extra passes an image that the strategy takes, forward and backward, as the paper counts them."""
    counts = look(manifest, "search", "forwards"), look(manifest, "search", "backwards")
    return sum(counts) if all(isinstance(count, int) for count in counts) else None


def load_runs(folders: Sequence[Path]) -> tuple[list[CertifyRun], list[TrainRun]]:
    """Each folder once, in the order given; one that holds no run is an InputError."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(_no_run(folder))
    unique = list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]
    names = short_names(unique)
    loaded = [_load(folder, names[folder]) for folder in unique]
    return [r for r in loaded if isinstance(r, CertifyRun)], [r for r in loaded if isinstance(r, TrainRun)]


def short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last parts of each path, as many as tell it from the others."""
    parts = {folder: folder.resolve().parts for folder in folders}
    ends = Counter(p[-count:] for p in parts.values() for count in range(1, len(p) + 1))
    return {folder: printable("/".join(_shortest(p, ends))) for folder, p in parts.items()}


def _shortest(parts: tuple[str, ...], ends: Mapping[tuple[str, ...], int]) -> tuple[str, ...]:
    return next((parts[-count:] for count in range(1, len(parts)) if ends[parts[-count:]] == 1), parts)


def _load(folder: Path, name: str) -> CertifyRun | TrainRun:
    manifest, doubts = _manifest(folder)
    command = manifest.get("command")
    if command in ("certify", "attack") or (command is None and (folder / "records.jsonl").is_file()):
        return _certify_run(folder, name, manifest, doubts)
    if command == "train" or (command is None and (folder / "log.jsonl").is_file()):
        return _train_run(folder, name, manifest, doubts)
    if command is not None:
        raise InputError(
            f"{folder} holds a `{printable(str(command))}` run; reports are about certify, attack and train runs"
        )
    raise InputError(_no_run(folder))


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}; name the folder of a run, as `patchproof ls runs` lists them"
    inside = sorted(path.parent for path in folder.glob("**/manifest.json"))
    hint = f"it has {count_words(len(inside), 'run', 'runs')} inside, e.g. {inside[0]}" if inside else "nor inside it"
    return f"{folder} is no run: it holds no manifest.json of certify, attack or train; {hint}"


def _manifest(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The manifest with the doubts about it; an empty one if there is none that can be read."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}, ["manifest.json is missing: what the run was made with is not known"]
    content = json_object(path)
    if content is None:
        return {}, ["manifest.json is damaged: what the run was made with is not known"]
    schema = content.get("schema")
    doubts = [] if schema == SCHEMA else [f"it was written with schema {schema}, this version reads {SCHEMA}"]
    return content, doubts


def _certify_run(folder: Path, name: str, manifest: dict[str, Any], doubts: list[str]) -> CertifyRun:
    found = read_lines(folder / "records.jsonl", parse_record, sums=read_sums(folder / "records.crc"))
    records = _once(found.values)
    if not manifest and not records:
        raise InputError(_no_run(folder))
    facts, results = read_facts(manifest), json_object(folder / "results.json")
    unknown = missing_facts(facts) if manifest else []
    notices = [
        *doubts,
        *([f"the manifest does not say {', '.join(unknown)}"] if unknown else []),
        *found.notices,
        *_record_doubts(found.values, records, facts),
        *_partial(records, facts),
        *_results_doubts(folder, results, records),
    ]
    names = label_names(manifest, records)
    return CertifyRun(folder, name, facts, records, names, _seconds(look(results or {}, "cost")), tuple(notices))


def _once(records: Iterable[Record]) -> tuple[Record, ...]:
    """The first record of each image."""
    found: dict[int, Record] = {}
    for record in records:
        found.setdefault(record.index, record)
    return tuple(found.values())


def _record_doubts(read: Sequence[Record], records: Sequence[Record], facts: Facts) -> list[str]:
    doubts = []
    if len(read) > len(records):
        words = count_words(len(read) - len(records), "record repeats", "records repeat")
        doubts.append(f"{words} an image that has one already; the first of each counts")
    if facts.planned is not None and facts.available is not None:
        planned = _plan(facts.planned, facts.available)
        strangers = sum(record.index not in planned for record in records)
        if strangers:
            words = count_words(strangers, "record is about an image", "records are about images")
            doubts.append(f"{words} that the manifest did not plan; they are counted")
    unproved = sum(bool(record.certified) and not record.defended for record in records)
    if unproved:
        words = count_words(unproved, "image is", "images are")
        doubts.append(f"{words} recorded as certified but answered wrong, which a certificate rules out")
    return doubts


def _plan(planned: int, available: int) -> range | set[int]:
    """The images a run looks at (`data.spread_indices`)."""
    places = evenly_spread(planned, available)
    return places if isinstance(places, range) else set(places)


def _partial(records: Sequence[Record], facts: Facts) -> list[str]:
    """Why the numbers are not about the whole data set."""
    reasons = []
    if facts.planned is not None and facts.available is not None and facts.planned < facts.available:
        reasons.append(f"partial: {facts.planned:,} of {facts.available:,} images were asked for (--limit)")
    if facts.planned is not None and len(records) < facts.planned:
        reasons.append(f"partial: {len(records):,} of {facts.planned:,} images are done; continue with --resume")
    bad = sum(record.error is not None for record in records)
    if bad:
        reasons.append(f"partial: {count_words(bad, 'bad image was', 'bad images were')} skipped")
    if not records:
        reasons.append("there is no record yet, so there is nothing to count")
    return reasons


def _results_doubts(folder: Path, results: Mapping[str, Any] | None, records: Sequence[Record]) -> list[str]:
    if results is None:
        state = "damaged" if (folder / "results.json").exists() else "missing"
        return [f"results.json is {state}; the accuracies are computed from the records, the time is not known"]
    names = [n for n in ATTACK_ACCURACIES if n in ACCURACIES or n in results]
    attacks = all(isinstance(record, AttackRecord) for record in records if record.error is None)
    counted = Tally(names if attacks and records else ACCURACIES).add(records).rates()
    wrong = [name for name in counted if look(results, name) is None or _differs(results[name], counted[name])]
    if not wrong:
        return []
    told = [f"{name} {_told(look(results, name))}, the records {_told(counted[name].as_dict())}" for name in wrong]
    return [f"results.json contradicts the records, which count: it says {'; '.join(told)}"]


def _differs(told: Any, counted: Rate) -> bool:
    return (look(told, "k"), look(told, "n")) != (counted.k, counted.n) if isinstance(told, Mapping) else True


def _told(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "nothing"
    return printable(f"{value.get('k')} of {value.get('n')}")


def _seconds(cost: Any) -> float | None:
    seconds = look(cost, "seconds") if isinstance(cost, Mapping) else None
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        return None
    return float(seconds) if math.isfinite(seconds) and seconds >= 0 else None


def _train_run(folder: Path, name: str, manifest: dict[str, Any], doubts: list[str]) -> TrainRun:
    found = read_lines(folder / "log.jsonl", _log_line)
    if not manifest and not found.values:
        raise InputError(_no_run(folder))
    losses = dict(value for value in found.values if not isinstance(value, Epoch))
    epochs = {value.epoch: value for value in found.values if isinstance(value, Epoch)}
    results, total = json_object(folder / "results.json"), manifest.get("steps")
    notices = [*doubts, *found.notices]
    if results is None:
        notices.append("results.json is missing or damaged: training was stopped, or the file was lost")
    if isinstance(total, int) and max(losses, default=0) < total:
        notices.append(f"partial: {max(losses, default=0):,} of {total:,} steps are done; continue with --resume")
    seconds = _seconds(results)
    return TrainRun(
        folder,
        name,
        manifest,
        tuple(sorted(losses.items())),
        tuple(epochs[number] for number in sorted(epochs)),
        seconds,
        tuple(notices),
    )


def _log_line(line: str) -> Epoch | tuple[int, float]:
    values = json.loads(line)
    if values["kind"] == "step":
        return int(values["step"]), float(values["loss"])
    if values["kind"] != "epoch":
        raise ValueError(f"unknown kind {values['kind']!r}")
    return Epoch(int(values["epoch"]), int(values["step"]), _rate(values["undefended"]), _rate(values["certified"]))


def _rate(values: Mapping[str, Any]) -> Rate:
    k, n = int(values["k"]), int(values["n"])
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}")
    return Rate(k, n)
