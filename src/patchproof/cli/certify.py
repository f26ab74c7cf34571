"""`patchproof certify`: from a folder of images to a certified accuracy."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from patchproof.cli._manifest import manifest
from patchproof.cli._setup import Setup, checked, open_classifier, open_source, prepare, sample_pixels
from patchproof.cli._show import results_table, run_progress
from patchproof.config import CertifyConfig
from patchproof.data import Batch, ImageSource, iterate_batches, spread_indices
from patchproof.defenses.patchcleanser import FIRST_BLOCK
from patchproof.evaluation import evaluate_batch
from patchproof.masking import as_images
from patchproof.models import match_labels
from patchproof.records import Record, RunFolder, check_prefix, summarize


def certify(*, config: Annotated[CertifyConfig, Parameter(name="*")] = CertifyConfig()) -> int:
    """Count the images that provably keep their label under any patch, and write one record for each."""
    stdout, stderr = Console(), Console(stderr=True)
    run = Run.begin(config)
    results = run.execute(stderr)
    stdout.print(results_table(results, title=run.title))
    for reason in results["partial"]:
        stdout.print(f"[yellow]partial:[/] {escape(reason)}")
    cost = results["cost"]
    stdout.print(f"{cost['forwards_per_image']:.1f} masked passes an image, {cost['seconds']:.0f} s")
    stdout.print(f"records, manifest and results: {escape(str(run.folder.path))}", soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Run:
    """One certification: what is certified, on which images, into which folder."""

    config: CertifyConfig
    source: ImageSource
    setup: Setup
    indices: Sequence[int]
    classes: torch.Tensor
    folder: RunFolder

    @classmethod
    def begin(cls, config: CertifyConfig) -> Run:
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
        )
        folder = RunFolder(config.output or Path("runs") / default_name(config, source, classifier.architecture))
        return cls(config, source, setup, spread_indices(source, config.limit), classes, folder)

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
        """Do what is not done yet; the results cover all of it."""
        started = time.monotonic()
        setup, drift = checked(self.setup, sample_pixels(self.source, self.setup.preprocessing, self.indices))
        current = manifest(self.config, setup, self.source, self.indices, drift)
        with self.folder.open(current, resume=self.config.resume) as stored:
            setup = setup.as_stored(stored, keep_chunk=self.config.batch_size != "auto")
            records = self.folder.records()
            check_prefix(records, self.indices, [self.source.path(i) for i in self.indices], where=self.folder.path)
            earlier = previous_seconds(self.folder)
            try:
                with run_progress(console, total=len(self.indices), records=records) as progress:
                    for fresh in self._records_from(setup, len(records)):
                        self.folder.append(fresh)
                        records.extend(fresh)
                        progress.add(fresh)
            finally:
                seconds = earlier + time.monotonic() - started
                results = summarize(records, planned=len(self.indices), available=len(self.source), seconds=seconds)
                self.folder.write_results(results)
        return results

    def _records_from(self, setup: Setup, done: int) -> Iterator[list[Record]]:
        """Records from position `done` on. Batches always begin at the same positions, so that an image has the same
        company, and the same last digits, in an interrupted run as in an undisturbed one."""
        step = max(1, setup.engine.chunk // FIRST_BLOCK)
        position = done - done % step
        batches = iterate_batches(
            self.source,
            setup.preprocessing,
            self.indices[position:],
            batch_size=step,
            workers=self.config.workers,
            skip_bad=self.config.skip_bad,
        )
        for batch in batches:
            records = self._evaluate(setup, batch)
            yield records[max(0, done - position) :]
            position += len(records)

    def _evaluate(self, setup: Setup, batch: Batch) -> list[Record]:
        bad = [
            Record(b.index, b.path, int(self.classes[self.source.labels[b.index]]), error=b.reason) for b in batch.bad
        ]
        if not batch.indices:
            return bad
        good = evaluate_batch(
            setup.defense,
            setup.classifier,
            as_images(batch.images, setup.device),
            self.classes[batch.labels].to(setup.device),
            indices=batch.indices,
            paths=[self.source.path(i) for i in batch.indices],
            engine=setup.engine,
        )
        return sorted([*good, *bad], key=lambda record: record.index)


def previous_seconds(folder: RunFolder) -> float:
    """Time that earlier sessions of this run took, as far as they could write it down."""
    cost = (folder.results() or {}).get("cost")
    seconds = cost.get("seconds") if isinstance(cost, dict) else None
    return float(seconds) if isinstance(seconds, (int, float)) else 0.0


def default_name(config: CertifyConfig, source: ImageSource, architecture: str) -> str:
    weights = Path(config.weights).name
    limit = f"-{config.limit}images" if config.limit else ""
    space = "-native" if config.threat_space == "native" else ""
    name = f"certify-{source.name}-{architecture}-{weights}-{config.patch}-{config.masks}x{config.masks}{space}{limit}"
    return re.sub(r"[^A-Za-z0-9._%-]+", "_", name)
