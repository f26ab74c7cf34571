"""The certifications under results/, counted from their records."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchproof.records import ACCURACIES, Rate, Record, Tally


@dataclass(frozen=True)
class Training:
    """One fine-tuning: what it took."""

    seconds: float
    epochs: int
    device: str
    forwards: int
    backwards: int


@dataclass(frozen=True)
class Result:
    """One certification, counted from its records."""

    experiment: str
    strategy: str
    seed: int
    native: bool
    patch: str
    masks: int
    rates: dict[str, Rate]
    available: int
    passes: float
    seconds: float
    device: str
    training: Training | None
    images: frozenset[int]
    proven: frozenset[int]
    """Which images were looked at, and which of them certified."""

    @property
    def certified(self) -> Rate:
        return self.rates["certified"]


def read(folder: Path) -> list[Result]:
    """Every certification below the folder."""
    found = [path.parent for path in sorted(folder.rglob("manifest.json"))]
    return [result(path, folder) for path in found if _json(path / "manifest.json")["command"] == "certify"]


def result(path: Path, root: Path) -> Result:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    lines = lzma.decompress((path / "records.jsonl.xz").read_bytes()).decode().splitlines()
    records = [Record.parse(line) for line in lines]
    tally = Tally().add(records)
    for name in ACCURACIES:
        if (tally.rates()[name].k, tally.rates()[name].n) != (results[name]["k"], results[name]["n"]):
            raise SystemExit(f"{path}: results.json contradicts the records about `{name}`")
    experiment, run = path.relative_to(root).parts[:2]
    strategy, _, seed = run.partition("-seed")
    config = manifest["config"]
    train = root / experiment / run / "train"
    return Result(
        experiment=experiment,
        strategy=strategy,
        seed=int(seed or 0),
        native=config["threat_space"] == "native",
        patch=config["patch"],
        masks=config["masks"],
        rates=tally.rates(),
        available=manifest["data"]["images"],
        passes=tally.forwards / tally.good,
        seconds=results["cost"]["seconds"],
        device=manifest["device"],
        training=training(train) if train.is_dir() else None,
        images=frozenset(record.index for record in records),
        proven=frozenset(record.index for record in records if record.certified),
    )


def training(path: Path) -> Training:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    return Training(
        results["seconds"],
        manifest["config"]["epochs"],
        manifest["device"],
        manifest["search"]["forwards"],
        manifest["search"]["backwards"],
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def pick(results: Iterable[Result], **wanted: object) -> list[Result]:
    return [r for r in results if all(getattr(r, name) == value for name, value in wanted.items())]
