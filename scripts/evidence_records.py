"""The runs under results/, counted from their records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from patchproof.runs import ATTACK_ACCURACIES, Rate, StoredCertification, StoredTraining, Tally, read_json, read_run


@dataclass(frozen=True)
class Result:
    """One certification, counted from its records."""

    experiment: str
    strategy: str
    seed: int
    native: bool
    patch: str
    masks: int
    rates: Mapping[str, Rate]
    available: int
    passes: float
    seconds: float
    device: str
    training: StoredTraining | None
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
    rates: Mapping[str, Rate]
    available: int
    broken: int
    passes: int
    queries: int
    plan: str
    precision: str
    seed: int
    seconds: float
    device: str


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


LEADERBOARD = "leaderboard"
DEFENSES = ("double masking", "mask removed", "literal rule")


def stored(path: Path) -> Any:
    """The run in this folder; one whose files contradict each other is refused."""
    run = read_run(path)
    remarks = read_json(path / "manifest.json").get("remarks") or ()  # true of a run that is whole
    wrong = [notice for notice in run.notices if not notice.startswith("partial: ") and notice not in remarks]
    if wrong:
        raise SystemExit(f"{path}: {wrong[0]}")
    return run


def runs_of(command: str, folder: Path) -> list[Path]:
    """Those with results: a folder gets them last."""
    found = [path.parent for path in sorted(folder.rglob("results.json"))]
    return [path for path in found if read_json(path / "manifest.json")["command"] == command]


@cache
def training(path: Path) -> StoredTraining | None:
    return stored(path) if path.is_dir() else None


def read(folder: Path) -> list[Result]:
    """Every certification below the folder, but those of the leaderboard (scripts/leaderboard.py)."""
    return [result(path, folder) for path in runs_of("certify", folder) if path.parents[1].name != LEADERBOARD]


def result(path: Path, root: Path) -> Result:
    run: StoredCertification = stored(path)
    experiment, name = path.relative_to(root).parts[:2]
    strategy, _, seed = name.partition("-seed")
    return Result(
        experiment=experiment,
        strategy=strategy,
        seed=int(seed or 0),
        native=run.native,
        patch=run.config["patch"],
        masks=run.config["masks"],
        rates=run.rates,
        available=run.available,
        passes=statistics.mean(record.forwards for record in run.good),
        seconds=run.seconds or 0.0,
        device=run.device,
        training=training(root / experiment / name / "train"),
        images=frozenset(record.index for record in run.good),
        proven=frozenset(record.index for record in run.good if record.certified),
        failing_in_the_middle=_in_the_middle(run),
    )


def _in_the_middle(run: StoredCertification) -> float | None:
    assert run.masks is not None
    row, column = (side // 2 for side in run.masks.image_size)
    rects = enumerate(run.masks.blocks)
    middle = {n for n, r in rects if r.top <= row < r.bottom and r.left <= column < r.right}
    failing = [record.evidence["witness"] for record in run.good if not record.certified]
    pairs = [set(witness["masks"]) for witness in failing if witness]
    return statistics.mean(bool(middle & pair) for pair in pairs) if pairs else None


def last_loss(training: StoredTraining) -> float:
    """Mean over the steps of the last epoch."""
    steps = len(training.losses) // training.config["epochs"]
    return statistics.mean(loss for _, loss in training.losses[-steps:])


def read_attacks(folder: Path) -> list[Attacked]:
    """Every run of attacks below the folder, but those of the leaderboard."""
    return [attacked(path, folder) for path in runs_of("attack", folder) if path.parents[1].name != LEADERBOARD]


def attacked(path: Path, root: Path) -> Attacked:
    run: StoredCertification = stored(path)
    experiment, name = path.relative_to(root).parts[:2]
    tally = Tally(ATTACK_ACCURACIES).add(run.good)
    return Attacked(
        experiment=experiment,
        strategy=name.partition("-seed")[0],
        patch=run.config["patch"],
        masks=run.config["masks"],
        rates=tally.rates(),
        available=run.available,
        broken=len(tally.broken),
        passes=tally.passes,
        queries=tally.queries,
        plan=_effort(run.config),
        precision=run.config["precision"],
        seed=run.config["seed"],
        seconds=run.seconds or 0.0,
        device=run.device,
    )


def read_campaigns(folder: Path) -> list[Onslaught]:
    """Every campaign in the folder, counted from the images it lists."""
    return [one for path in sorted((folder / "campaign").glob("*.json")) for one in _campaign(path)]


def _campaign(path: Path) -> list[Onslaught]:
    content = read_json(path)
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


def _effort(config: Mapping[str, Any]) -> str:
    return f"{config['places']} places, {config['restarts']} starts, {config['steps']} steps"


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
