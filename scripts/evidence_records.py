"""The certifications under results/, counted from their records."""

from __future__ import annotations

import json
import lzma
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from patchproof.records import ACCURACIES, ATTACK_ACCURACIES, Rate


@dataclass(frozen=True)
class Training:
    """One fine-tuning: what it took."""

    seconds: float
    epochs: int
    device: str
    forwards: int
    backwards: int
    last_loss: float
    """Mean over the steps of the last epoch."""

    @property
    def passes(self) -> int:
        """Extra passes an image, forward and backward, of all its copies."""
        return self.forwards + self.backwards


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
    failing_in_the_middle: float | None
    """Of the images that are not certified: how often the pair of masks they fail under by most, among those evaluated,
    hides the middle. None if all are certified."""

    @property
    def certified(self) -> Rate:
        return self.rates["certified"]


@dataclass(frozen=True)
class Attacked:
    """One run of attacks, counted from its records."""

    experiment: str
    strategy: str
    patch: str
    masks: int
    rates: dict[str, Rate]
    available: int
    broken: int
    passes: int
    queries: int
    plan: str
    precision: str
    seed: int
    seconds: float
    device: str


def read_attacks(folder: Path) -> list[Attacked]:
    """Every run of attacks below the folder."""
    return [attacked(path, folder) for path in runs_of("attack", folder)]


def attacked(path: Path, root: Path) -> Attacked:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    records = [record for record in map(json.loads, _lines(path)) if "error" not in record]
    rates = _counted(records, ATTACK_ACCURACIES)
    _refuse_contradiction(path, rates, results)
    experiment, run = path.relative_to(root).parts[:2]
    config = manifest["config"]
    return Attacked(
        experiment=experiment,
        strategy=run.partition("-seed")[0],
        patch=config["patch"],
        masks=config["masks"],
        rates=rates,
        available=manifest["data"]["images"],
        broken=sum(record["certified"] and record["attacked"] is False for record in records),
        passes=sum(record["passes"] for record in records),
        queries=sum(record["queries"] for record in records),
        plan=_effort(config),
        precision=config["precision"],
        seed=config["seed"],
        seconds=results["cost"]["seconds"],
        device=manifest["device"],
    )


@dataclass(frozen=True)
class Onslaught:
    """One defence in one campaign (scripts/campaign.py): certified images that were attacked, and those that fell."""

    network: str
    defense: str
    setting: str
    seen: int
    tried: int
    broken: int
    passes: int
    seconds: float
    plan: str
    precision: str
    seed: int
    device: str


DEFENSES = ("double masking", "mask removed", "literal rule")


def read_campaigns(folder: Path) -> list[Onslaught]:
    """Every campaign in the folder, counted from the images it lists."""
    return [one for path in sorted((folder / "campaign").glob("*.json")) for one in _campaign(path)]


def _campaign(path: Path) -> list[Onslaught]:
    content = _json(path)
    config = content["manifest"]["config"]
    found = []
    for name in [name for name in DEFENSES if name in content]:
        tally = content[name]
        tried, broken = len(set(tally["indices"])), len({b["index"] for b in tally["breaks"]})
        if (tried, broken) != (tally["tried"], tally["broken"]):
            raise SystemExit(f"{path}: the counts of `{name}` contradict the images listed")
        found.append(
            Onslaught(
                network=path.stem,
                defense=name,
                setting=f"{config['patch']}, {config['masks']}×{config['masks']} masks",
                seen=tally["seen"],
                tried=tried,
                broken=broken,
                passes=tally["passes"],
                seconds=tally["seconds"],
                plan=_effort(config),
                precision=config["precision"],
                seed=config["seed"],
                device=content["manifest"]["device"],
            )
        )
    return found


def _effort(config: dict[str, Any]) -> str:
    return f"{config['places']} places, {config['restarts']} starts, {config['steps']} steps"


def runs_of(command: str, folder: Path) -> list[Path]:
    """Those with results: a folder gets them last."""
    found = [path.parent for path in sorted(folder.rglob("results.json"))]
    return [path for path in found if _json(path / "manifest.json")["command"] == command]


def _lines(path: Path) -> list[str]:
    return lzma.decompress((path / "records.jsonl.xz").read_bytes()).decode().splitlines()


def _counted(records: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Rate]:
    """Each accuracy, over the records that have that finding. Plain lines: a hundred thousand of them take a second."""
    findings = {name: [record[name] for record in records if record[name] is not None] for name in names}
    return {name: Rate(found.count(True), len(found)) for name, found in findings.items()}


def _refuse_contradiction(path: Path, rates: dict[str, Rate], results: dict[str, Any]) -> None:
    for name, rate in rates.items():
        if (rate.k, rate.n) != (results[name]["k"], results[name]["n"]):
            raise SystemExit(f"{path}: results.json contradicts the records about `{name}`")


def read(folder: Path) -> list[Result]:
    """Every certification below the folder."""
    return [result(path, folder) for path in runs_of("certify", folder)]


def result(path: Path, root: Path) -> Result:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    records = [record for record in map(json.loads, _lines(path)) if "error" not in record]
    rates = _counted(records, ACCURACIES)
    _refuse_contradiction(path, rates, results)
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
        rates=rates,
        available=manifest["data"]["images"],
        passes=statistics.mean(record["forwards"] for record in records),
        seconds=results["cost"]["seconds"],
        device=manifest["device"],
        training=training(train) if train.is_dir() else None,
        images=frozenset(record["index"] for record in records),
        proven=frozenset(record["index"] for record in records if record["certified"]),
        failing_in_the_middle=_in_the_middle(records, manifest["masks"]),
    )


def _in_the_middle(records: list[dict[str, Any]], masks: dict[str, Any]) -> float | None:
    height, width = masks["image_size"]
    middle = {
        number
        for number, (top, left, tall, wide) in enumerate(masks["rects"])
        if top <= height // 2 < top + tall and left <= width // 2 < left + wide
    }
    failing = [record["witness"]["masks"] for record in records if record["witness"] and not record["certified"]]
    return statistics.mean(bool(middle & set(pair)) for pair in failing) if failing else None


@cache
def training(path: Path) -> Training:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    return Training(
        results["seconds"],
        manifest["config"]["epochs"],
        manifest["device"],
        manifest["search"]["forwards"],
        manifest["search"]["backwards"],
        _last_loss(path),
    )


def _last_loss(path: Path) -> float:
    lines = lzma.decompress((path / "log.jsonl.xz").read_bytes()).decode().splitlines()
    steps = [found for found in map(json.loads, lines) if found["kind"] == "step"]
    return statistics.mean(found["loss"] for found in steps if found["epoch"] == steps[-1]["epoch"])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def pick(results: Iterable[Result], **wanted: object) -> list[Result]:
    return [r for r in results if all(getattr(r, name) == value for name, value in wanted.items())]


class Paired(NamedTuple):
    """Two certifications on the images both looked at: how many only the one proves, and only the other."""

    images: int
    only: int
    lost: int
    points: float
    p: str
    """Of the exact two-sided McNemar test."""

    @property
    def half_width(self) -> float:
        """Of the 95% interval of `points`, by the normal approximation."""
        difference = (self.only - self.lost) / self.images
        return 196 * math.sqrt(((self.only + self.lost) / self.images - difference**2) / self.images)


def paired(one: Result, other: Result) -> Paired:
    common = one.images & other.images
    only, lost = len((one.proven - other.proven) & common), len((other.proven - one.proven) & common)
    chance = stats.binomtest(only, only + lost).pvalue if only + lost else 1.0
    return Paired(len(common), only, lost, 100 * (only - lost) / len(common), f"{chance:.1g}")
