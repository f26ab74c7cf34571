"""`patchproof certify`: from a folder of images to a certified accuracy."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.markup import escape

from patchproof.cli._manifest import manifest
from patchproof.cli._setup import (
    Setup,
    changes_since,
    checked,
    choose_workers,
    images_at_once,
    open_classifier,
    open_source,
    prepare,
    sample_pixels,
    stored_engine,
)
from patchproof.cli._show import RunProgress, results_table, run_progress
from patchproof.cli._terminal import Console
from patchproof.config import CertifyConfig, parse_batch_size
from patchproof.data import Batch, ImageSource, load_groups, spread_indices
from patchproof.evaluation import evaluate_batch
from patchproof.masking import Audit, images_ahead
from patchproof.models import match_labels
from patchproof.records import Record, RunFolder, Tally, checked_prefix, read_json
from patchproof.team import Team, join_team
from patchproof.types import CheckError, PatchproofError

TAU_MAY_GROW = 2.0
"""The safety factors of τ are several times this."""

SECONDS_FOR_MAIN = 3.0
"""What is wrong for every process is said by the main one; the launcher then ends the others before they say it too."""


def certify(*, config: Annotated[CertifyConfig, Parameter(name="*")] = CertifyConfig()) -> int:
    """Count the images that provably keep their label under any patch, and write one record for each."""
    team = join_team()
    try:
        with team.at_work():
            run = Run.begin(config, team)
            results = run.execute(Console(stderr=True))
    except PatchproofError:
        if not team.is_main:
            time.sleep(SECONDS_FOR_MAIN)
        raise
    if team.is_main:
        show(run, results)
    return 0


def show(run: Run, results: dict[str, Any]) -> None:
    stdout = Console()
    stdout.print(results_table(results, title=run.title))
    for reason in results["partial"]:
        stdout.print(f"[yellow]partial:[/] {escape(reason)}")
    cost, redone = results["cost"], results["audit"]["redone"]
    again = f", {redone / max(1, cost['forwards']):.1%} of them to decide again in float32" if redone else ""
    stdout.print(f"{cost['forwards_per_image']:.1f} masked passes an image{again}, {cost['seconds']:.0f} s")
    if cost["batch_size"] and cost["batch_size"] < read_json(run.folder.manifest_path)["batch_size"]:
        stdout.print(f"memory ran out; went on with {cost['batch_size']} masked copies at once (--batch-size)")
    stdout.print(f"records, manifest and results: {escape(str(run.folder.path))}", soft_wrap=True)


@dataclass(frozen=True)
class Run:
    """One certification: what is certified, on which images, into which folder, by how many processes."""

    config: CertifyConfig
    source: ImageSource
    setup: Setup
    indices: Sequence[int]
    classes: torch.Tensor
    folder: RunFolder
    team: Team = field(default_factory=Team)

    @classmethod
    def begin(cls, config: CertifyConfig, team: Team | None = None) -> Run:
        team = team or Team()
        source = open_source(config)
        classifier = open_classifier(config, num_classes=len(source.class_names), class_names=source.class_names)
        classes = torch.tensor(match_labels(source.class_names, classifier))
        native = source.native_sizes() if config.threat_space == "native" else set()
        setup = prepare(
            config,
            classifier,
            low_resolution=source.low_resolution,
            native_sizes=native,
            exhaustive=config.exhaustive,
            local_rank=team.local_rank if team.size > 1 else None,
        )
        folder = RunFolder(config.output or Path("runs") / default_name(config, source, classifier.architecture))
        return cls(config, source, setup, spread_indices(source, config.limit), classes, folder, team)

    @property
    def title(self) -> str:
        sizes = " or ".join(f"{h}×{w}" for h, w in self.setup.threat.patch_sizes)
        axes = self.setup.masks.axes
        height, width = self.setup.masks.image_size
        return (
            f"{self.setup.classifier.architecture} on {self.source.name}: one patch of {sizes} pixels anywhere on "
            f"{height}×{width}, {len(axes[0])}×{len(axes[1])} masks"
        )

    def execute(self, console: Console) -> dict[str, Any]:
        """Do what is not done yet; the results cover all of it, and are empty on processes that do not write."""
        started = time.monotonic()
        setup, drift = checked(self.setup, sample_pixels(self.source, self.setup, self.indices))
        current = manifest(self.config, setup, self.source, self.indices, drift, processes=self.team.size)
        if not self.team.is_main:
            self._help(setup, current)
            return {}
        agree(self.team, current)
        with self.folder.open(current, resume=self.config.resume) as stored:
            engine = resumed_engine(self.config, stored, current, where=self.folder.path)
            found = checked_prefix(self.folder.each_record(), self.indices, self.source.path, where=self.folder.path)
            tally = Tally().add(found)
            cost = Cost.so_far(self.folder)
            earlier = cost.seconds
            self.team.tell("go", {"engine": engine, "done": tally.done})
            pieces = Pieces(self, setup.with_engine(**engine), tally.done)

            def results(doubts: Sequence[str]) -> dict[str, Any]:
                cost.seconds = earlier + time.monotonic() - started
                return self._results(tally, cost, doubts)

            listed = current["identity"]["data_sha256"]
            with run_progress(console, total=len(self.indices), tally=tally) as progress:
                return keep_records(
                    pieces.records(cost),
                    self.folder,
                    progress,
                    doubts=lambda: changes_since(listed, self.config, self.source),
                    results=results,
                )

    def _results(self, tally: Tally, cost: Cost, doubts: Sequence[str]) -> dict[str, Any]:
        results = tally.results(
            planned=len(self.indices), available=len(self.source), seconds=cost.seconds, doubts=doubts
        )
        results["cost"]["batch_size"] = cost.batch_size
        results["cost"]["processes"] = self.team.size
        return results | {"audit": {"redone": cost.redone, "largest_change": cost.largest_change}}

    def _help(self, setup: Setup, current: dict[str, Any]) -> None:
        """On every process but the main one: say what this one sees, then work on whatever is to be done."""
        self.team.tell(f"manifest/{self.team.rank}", {key: current[key] for key in ("identity", "tau", "batch_size")})
        go = self.team.told("go")
        for _ in Pieces(self, setup.with_engine(**go["engine"]), go["done"]).work():
            pass


@dataclass(frozen=True)
class Pieces:
    """The images still to be done, in groups that always begin at the same positions, so that an image has the same
    company, and the same last digits, in any session and on any number of processes."""

    run: Run
    setup: Setup
    done: int

    @property
    def size(self) -> int:
        return images_at_once(self.setup.engine.chunk, self.setup.device)

    @property
    def todo(self) -> range:
        end = -(-len(self.run.indices) // self.size)
        return range(self.done // self.size if self.done < len(self.run.indices) else end, end)

    def records(self, cost: Cost) -> Iterator[list[Record]]:
        """On the main process: the records that are missing, in order, whoever finds them."""
        todo = self.todo
        skip, gathered = self.done % self.size, 0

        def fresh(*, wait: bool) -> Iterator[list[Record]]:
            nonlocal skip, gathered
            for text in self.run.team.gathered(todo[gathered:], wait=wait):
                answer = json.loads(text)
                cost.add(answer)
                gathered += 1
                yield [Record.parse(line) for line in answer["records"][skip:]]
                skip = 0

        for _ in self.work():
            yield from fresh(wait=False)
        yield from fresh(wait=True)

    def work(self) -> Iterator[int]:
        """Claim pieces, evaluate them and hand in their records, until none is left; yields the number of each."""
        claimed: deque[int] = deque()

        def groups() -> Iterator[Sequence[int]]:
            for piece in self.run.team.claims(self.todo):
                claimed.append(piece)
                yield self.run.indices[piece * self.size : (piece + 1) * self.size]

        batches = load_groups(
            self.run.source,
            self.setup.preprocessing,
            groups(),
            workers=choose_workers(self.run.config),
            skip_bad=self.run.config.skip_bad,
            ahead=1,
        )
        for batch, images in images_ahead(((batch, batch.images) for batch in batches), self.setup.device):
            piece = claimed.popleft()
            self.run.team.deliver(piece, self._answer(batch, images))
            yield piece

    def _answer(self, batch: Batch, images: torch.Tensor) -> str:
        runner = self.setup.defense.runner
        runner.audit = Audit()
        records = [record.line() for record in self._evaluate(batch, images)]
        return json.dumps({"records": records, "audit": asdict(runner.audit), "batch_size": runner.chunk})

    def _evaluate(self, batch: Batch, images: torch.Tensor) -> list[Record]:
        source, classes = self.run.source, self.run.classes
        bad = [Record(b.index, b.path, int(classes[source.labels[b.index]]), error=b.reason) for b in batch.bad]
        if not batch.indices:
            return bad
        good = evaluate_batch(
            self.setup.defense,
            self.setup.defense.runner,
            images,
            classes[batch.labels].to(self.setup.device),
            indices=batch.indices,
            paths=[source.path(i) for i in batch.indices],
        )
        return sorted([*good, *bad], key=lambda record: record.index)


@dataclass
class Cost:
    """What a run took besides passes, over all its sessions and processes."""

    seconds: float = 0.0
    redone: int = 0
    largest_change: float = 0.0
    batch_size: int | None = None

    @classmethod
    def so_far(cls, folder: RunFolder) -> Cost:
        """Of earlier sessions of this run, as far as they could write it down."""
        try:
            audit = (folder.results() or {})["audit"]
            return cls(earlier_seconds(folder), int(audit["redone"]), float(audit["largest_change"]))
        except (CheckError, KeyError, TypeError, ValueError, OverflowError):
            return cls(earlier_seconds(folder))

    def add(self, answer: dict[str, Any]) -> None:
        self.redone += answer["audit"]["redone"]
        self.largest_change = max(self.largest_change, answer["audit"]["largest_change"])
        self.batch_size = min(self.batch_size or answer["batch_size"], answer["batch_size"])


def earlier_seconds(folder: RunFolder) -> float:
    """Time that earlier sessions of this run took, as far as they could write it down."""
    try:
        return float((folder.results() or {})["cost"]["seconds"])
    except (CheckError, KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def keep_records(
    batches: Iterable[Sequence[Record]],
    folder: RunFolder,
    progress: RunProgress,
    *,
    doubts: Callable[[], list[str]],
    results: Callable[[Sequence[str]], dict[str, Any]],
) -> dict[str, Any]:
    """Append what the batches find, and count it. However that ends, the results are written and say how far it came;
    what makes all of it doubtful, such as images that changed meanwhile, spoils the folder."""
    found: list[str] = []
    try:
        for fresh in batches:
            folder.append(fresh)
            progress.add(fresh)
        found = doubts()
    finally:
        written = results(found)
        folder.write_results(written)
    for doubt in found:
        folder.spoil(doubt)
    return written


def resumed_engine(
    config: CertifyConfig, stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path
) -> dict[str, Any]:
    """What a run goes on with: the τ it began with, and its chunk unless --batch-size names another."""
    refuse_larger_tau(stored, current, where=where)
    explicit = parse_batch_size(config.batch_size) is not None
    return stored_engine(stored, chunk=current["batch_size"] if explicit else None)


def refuse_larger_tau(stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path) -> None:
    """A run goes on with the τ it began with, as long as what is measured now is not far from it."""
    for kind in ("fast", "fp32"):
        before, now = stored.get("tau", {}).get(kind, 0.0), current["tau"][kind]
        if now > TAU_MAY_GROW * before:
            raise CheckError(
                f"{where} was begun with τ({kind}) = {before:.3g}, but here and now it would be {now:.3g}: another "
                "device, torch or --batch-size; go on where it was begun, or choose another --output"
            )


def agree(team: Team, current: dict[str, Any]) -> None:
    """Every process sees the same weights, images and settings; the largest τ and the smallest chunk hold for all."""
    for rank in range(1, team.size):
        theirs = team.told(f"manifest/{rank}")
        different = [key for key, value in current["identity"].items() if theirs["identity"].get(key) != value]
        if different:
            raise CheckError(
                f"process {rank} of {team.size} sees another {different[0]}: {theirs['identity'].get(different[0])} "
                f"instead of {current['identity'][different[0]]}; give every machine the same files"
            )
        for kind in ("fast", "fp32"):
            current["tau"][kind] = max(current["tau"][kind], theirs["tau"][kind])
        current["batch_size"] = min(current["batch_size"], theirs["batch_size"])


def default_name(config: CertifyConfig, source: ImageSource, architecture: str) -> str:
    weights = Path(config.weights).name
    limit = f"-{config.limit}images" if config.limit else ""
    space = "-native" if config.threat_space == "native" else ""
    name = f"certify-{source.name}-{architecture}-{weights}-{config.patch}-{config.masks}x{config.masks}{space}{limit}"
    return re.sub(r"[^A-Za-z0-9._%-]+", "_", name)
