"""`patchproof attack`: how low can patches push the accuracy, and does the certified one hold below it?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from patchproof.attacks import Attack, AttackPlan, defended_attacks, undefended_attacks
from patchproof.cli._breaks import save_break
from patchproof.cli._manifest import manifest
from patchproof.cli._setup import Setup, changes_since, checked, choose_workers, sample_pixels
from patchproof.cli._show import results_table, run_progress
from patchproof.cli._terminal import Console
from patchproof.cli.certify import Run, default_name, earlier_seconds, keep_records, resumed_engine
from patchproof.config import AttackConfig
from patchproof.data import Batch, iterate_batches
from patchproof.evaluation import attack_batch, evaluate_batch
from patchproof.masking import as_images
from patchproof.records import ATTACK_ACCURACIES, AttackRecord, Record, RunFolder, Tally, checked_prefix
from patchproof.types import InputError

IMAGES_AT_ONCE = 16

SETTINGS = ("target", "steps", "restarts", "places", "place_search", "step_size", "only_certified", "seed")


def attack(*, config: Annotated[AttackConfig, Parameter(name="*")] = AttackConfig()) -> int:
    """Certify images and attack them with patches: accuracy under attack beside the provable one."""
    stdout, stderr = Console(), Console(stderr=True)
    run = AttackRun.begin(config)
    results = run.execute(stderr)
    stdout.print(results_table(results, title=run.whole.title, names=ATTACK_ACCURACIES))
    for reason in results["partial"]:
        stdout.print(f"[yellow]partial:[/] {escape(reason)}")
    cost = results["cost"]
    stdout.print(f"{cost['passes_per_image']:.0f} passes an image to attack it, {cost['seconds']:.0f} s")
    stdout.print(f"records, manifest and results: {escape(str(run.folder.path))}", soft_wrap=True)
    for index in results["broken"]:
        where = run.folder.path / "broken" / str(index)
        stderr.print(
            f"[bold red]broken:[/] image {index} is certified and a patch changes its answer; image, patch and both "
            f"label tables are in {escape(str(where))}, tables.json says how to ask the defence again",
            soft_wrap=True,
        )
    return 1 if results["broken"] else 0


@dataclass
class AttackTally(Tally):
    """Counts of an attack: besides the accuracies, what it took and which certified images broke."""

    names: Sequence[str] = ATTACK_ACCURACIES
    passes: int = 0
    queries: int = 0
    broken: list[int] = field(default_factory=list)

    def add(self, records: Iterable[Record]) -> AttackTally:
        for record in records:
            super().add([record])
            if isinstance(record, AttackRecord):
                self.passes += record.passes
                self.queries += record.queries
                self.broken += [record.index] if record.broken else []
        return self

    def results(self, *, planned: int, available: int, seconds: float, doubts: Sequence[str] = ()) -> dict[str, Any]:
        results = super().results(planned=planned, available=available, seconds=seconds, doubts=doubts)
        per_image = self.passes / self.good if self.good else 0.0
        results["cost"] |= {"passes": self.passes, "passes_per_image": per_image, "queries": self.queries}
        return results | {"broken": self.broken}


@dataclass(frozen=True)
class AttackRun:
    """One attack: a certification (`whole`) of the same images, and patches on them."""

    config: AttackConfig
    plan: AttackPlan
    whole: Run
    folder: RunFolder

    @classmethod
    def begin(cls, config: AttackConfig) -> AttackRun:
        if config.only_certified and config.target == "undefended":
            raise InputError("--only-certified is about the defence, and --target undefended leaves it alone; drop one")
        plan = AttackPlan(config.steps, config.restarts, config.places, config.step_size, config.place_search)
        whole = Run.begin(config)
        name = default_name(config, whole.source, whole.setup.classifier.architecture)
        folder = RunFolder(config.output or Path("runs") / name.replace("certify", "attack", 1))
        return cls(config, plan, whole, folder)

    def execute(self, console: Console) -> dict[str, Any]:
        """Do what is not done yet; the results cover all of it."""
        started = time.monotonic()
        whole, source = self.whole, self.whole.source
        setup, drift = checked(whole.setup, sample_pixels(source, whole.setup, whole.indices))
        current = manifest(self.config, setup, source, whole.indices, drift) | {"command": "attack"}
        current["identity"] |= {"attack": {name: getattr(self.config, name) for name in SETTINGS}}
        with self.folder.open(current, resume=self.config.resume) as stored:
            setup = setup.with_engine(**resumed_engine(self.config, stored, current, where=self.folder.path))
            found = checked_prefix(self.folder.each_record(), whole.indices, source.path, where=self.folder.path)
            tally, earlier = AttackTally().add(found), earlier_seconds(self.folder)

            def results(doubts: Sequence[str]) -> dict[str, Any]:
                seconds, planned = earlier + time.monotonic() - started, len(whole.indices)
                return tally.results(planned=planned, available=len(source), seconds=seconds, doubts=doubts)

            listed = current["identity"]["data_sha256"]
            with run_progress(console, total=len(whole.indices), tally=tally, verb="attack") as progress:
                return keep_records(
                    self._records_from(setup, tally.done),
                    self.folder,
                    progress,
                    doubts=lambda: changes_since(listed, self.config, source),
                    results=results,
                )

    def _records_from(self, setup: Setup, done: int) -> Iterator[list[AttackRecord]]:
        """Records from position `done` on, in batches that always begin at the same positions, as in `certify`."""
        if done == len(self.whole.indices):
            return
        position = done - done % IMAGES_AT_ONCE
        batches = iterate_batches(
            self.whole.source,
            setup.preprocessing,
            self.whole.indices[position:],
            batch_size=IMAGES_AT_ONCE,
            workers=choose_workers(self.config),
            skip_bad=self.config.skip_bad,
        )
        attacks = self._attacks(setup)
        for batch in batches:
            records = self._attack(setup, batch, *attacks)
            yield records[max(0, done - position) :]
            position += len(records)

    def _attack(
        self, setup: Setup, batch: Batch, undefended: Sequence[Attack], defended: Sequence[Attack]
    ) -> list[AttackRecord]:
        """One batch, certified and attacked; what broke is on disk before its record is."""
        source, classes = self.whole.source, self.whole.classes
        bad = [AttackRecord(b.index, b.path, int(classes[source.labels[b.index]]), error=b.reason) for b in batch.bad]
        if not batch.indices:
            return bad
        images, labels = as_images(batch.images, setup.device), classes[batch.labels].to(setup.device)
        certified = evaluate_batch(
            setup.defense,
            setup.defense.runner,
            images,
            labels,
            indices=batch.indices,
            paths=[source.path(i) for i in batch.indices],
        )
        good, breaks = attack_batch(
            certified,
            images,
            labels,
            undefended=undefended,
            defended=defended,
            only_certified=self.config.only_certified,
            seed=self.config.seed,
        )
        for found in breaks:
            save_break(self.folder.path / "broken", found, setup)
        return sorted([*good, *bad], key=lambda record: record.index)

    def _attacks(self, setup: Setup) -> tuple[list[Attack], list[Attack]]:
        """Those on the classifier alone and those on the defence, as far as --target asks for them."""
        classifier, threat, engine = setup.classifier, setup.threat, setup.engine
        alone: list[Attack] = []
        behind: list[Attack] = []
        if self.config.target != "defended":
            alone = undefended_attacks(classifier, threat, plan=self.plan, engine=engine)
        if self.config.target != "undefended":
            behind = defended_attacks(classifier, setup.defense, threat, setup.masks, plan=self.plan, engine=engine)
        return alone, behind
