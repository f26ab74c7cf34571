"""`patchproof train`: fine-tune a classifier on the masks that hurt it most."""

from __future__ import annotations

import importlib.util
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from cyclopts import Parameter
from rich.markup import escape

from patchproof.cli._manifest import training_manifest
from patchproof.cli._setup import (
    START_AGAIN,
    choose_chunk,
    choose_device,
    choose_preprocessing,
    choose_workers,
)
from patchproof.cli._show import percent, results_table, training_progress
from patchproof.cli._terminal import Console
from patchproof.cli._training_log import TrainingLog
from patchproof.cli._training_start import open_sources, open_start, with_classes_of
from patchproof.cli._validate import Validation
from patchproof.cli.certify import Run
from patchproof.config import CertifyConfig, TrainConfig, parse_batch_size, parse_patches
from patchproof.data import FolderSource, ImageSource, spread_indices
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.models import ImageClassifier, match_labels, save_checkpoint, weights_sha256
from patchproof.recipes import find_recipe
from patchproof.records import RunFolder
from patchproof.training import Plan, paper_learning_rate, require_strategy
from patchproof.types import InputError, Size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from patchproof.training.loop import StepReport, Trainer


def train(*, config: Annotated[TrainConfig, Parameter(name="*")] = TrainConfig()) -> int:
    """Fine-tune on masked copies, validate and save after each epoch; a killed run goes on with --resume."""
    console = Console()
    run = TrainRun.begin(config)
    results = run.execute(Console(stderr=True))
    if run.accelerator.is_main_process:
        best = results["best"]
        console.print(
            f"best epoch {best['epoch']} of {config.epochs}: undefended {percent(best['undefended']['rate'])}, "
            f"certified {percent(best['certified']['rate'])} of {best['certified']['n']} validation images (3×3 masks)"
        )
        console.print(f"checkpoints and log: {escape(str(run.folder.path))}", soft_wrap=True)
        if config.recipe:
            certify_recipe(config, run.folder.path, console)
    return 0


@dataclass(frozen=True)
class TrainRun:
    """One fine-tuning: what learns, from what, into which folder."""

    config: TrainConfig
    plan: Plan
    trainer: Trainer
    shipped: ImageClassifier
    validation: Validation
    source: ImageSource
    folder: RunFolder

    @property
    def accelerator(self) -> Accelerator:
        return self.trainer.accelerator

    @classmethod
    def begin(cls, config: TrainConfig) -> TrainRun:
        import copy

        from patchproof.training.loop import Trainer, TrainingData

        require_strategy(config.strategy)
        accelerator = start_accelerator(config)
        source, held_out = open_sources(config)
        classifier = with_classes_of(source, open_start(config, source), seed=config.seed)
        shipped = copy.deepcopy(classifier).to(accelerator.device)
        plan = make_plan(config, classifier.architecture)
        data = TrainingData(
            source,
            spread_indices(source, config.limit),
            torch.tensor(match_labels(source.class_names, classifier)),
            choose_preprocessing(classifier, low_resolution=source.low_resolution),
            workers=choose_workers(config),
            skip_bad=config.skip_bad,
            keep_decoded=config.keep_decoded,
        )
        # A copy that is only looked at takes a fraction of the memory of one that is learned from, so up to four times
        # as many as the step has at once still need less than the step (benchmarks/README.md). Twice as many suit
        # `greedy`, which looks at 9, 4, 8 and 4 copies of each image in turn: hardly a chunk is left half empty.
        copies = max(1, 2 * plan.batch_size // plan.accumulate // accelerator.num_processes)
        chunk = min(2 * copies, choose_chunk("auto", classifier.input_size, accelerator.device))
        masks = training_pair(config.mask_patch, classifier.input_size)
        trainer = Trainer(classifier, data, plan, accelerator=accelerator, masks=masks, chunk=chunk)
        validation = Validation.on(held_out, shipped, config, accelerator.device)
        folder = RunFolder(config.output or Path("runs") / default_name(config, source, classifier.architecture))
        return cls(config, plan, trainer, shipped, validation, source, folder)

    def execute(self, console: Console) -> dict[str, Any]:
        """Train what is not trained yet. Only the main process writes."""
        from patchproof.training.checkpoint import load_training

        manifest = training_manifest(self.config, self.plan, self.shipped, self.trainer, self.validation.source)
        with self.folder.open_shared(manifest, resume=self.config.resume, writes=self.accelerator.is_main_process):
            self._start_tracking()
            resumed = load_training(self.folder.path / "checkpoint-last", self.trainer)
            notes = dict(resumed.notes) if resumed else {"epochs": [], "best": None, "seconds": 0.0}
            log = TrainingLog(self.folder.path / "log.jsonl", writes=self.accelerator.is_main_process)
            lost = log.cut_after(self.trainer.step)
            if lost:
                console.print(f"[yellow]note:[/] log.jsonl has lost {lost} steps; the weights do not depend on it")
            with training_progress(console, self.trainer, shown=self.accelerator.is_main_process) as progress:
                for report in self._steps(notes):
                    log.step(report)
                    self._track({"loss": report.loss, "learning_rate": report.learning_rate}, report.step)
                    progress.add(report)
                    if report.step % self.trainer.steps_per_epoch == 0:
                        self._finish_epoch(report, notes, log, progress.console)
            results = {"schema": 1, "status": "complete", "best": notes["best"], **notes}
            if self.accelerator.is_main_process:
                for doubt in self._changes(manifest["identity"]):
                    self.folder.spoil(doubt)
                self.shipped.load_state_dict(self.trainer.weights())
                results["weights_sha256"] = weights_sha256(self.shipped)
                self.folder.write_results(results)
        self.accelerator.end_training()
        return results

    def _changes(self, identity: dict[str, Any]) -> list[str]:
        """Whether the images to learn from or to validate on changed since training began; data in memory cannot."""
        if not any(isinstance(images, FolderSource) for images in (self.source, self.validation.source)):
            return []
        source, held_out = open_sources(self.config)
        now = {"data_sha256": source, "validation_sha256": held_out}
        return [
            f"the images changed during training ({key}); {START_AGAIN}"
            for key, images in now.items()
            if isinstance(images, FolderSource) and images.listing_sha256() != identity[key]
        ]

    def _steps(self, notes: dict[str, Any]) -> Iterator[StepReport]:
        """The reports of the run; between epochs a checkpoint is saved now and then."""
        saved = clock = time.monotonic()
        for report in self.trainer.run():
            notes["seconds"] += time.monotonic() - clock
            clock = time.monotonic()
            yield report
            if clock - saved > 60 * self.config.checkpoint_minutes:
                self._save("checkpoint-last", notes)
                saved = time.monotonic()

    def _finish_epoch(self, report: StepReport, notes: dict[str, Any], log: TrainingLog, console: Console) -> None:
        """Validate, note, and save; `checkpoint-best` is chosen by certified accuracy, then by the undefended one."""
        self.shipped.load_state_dict(self.trainer.weights())
        found = self.validation.measure(self.shipped) if self.accelerator.is_main_process else None
        self.accelerator.wait_for_everyone()
        if found is None:
            return
        epoch = {"epoch": report.epoch + 1, "step": report.step, **{k: r.as_dict() for k, r in found.items()}}
        notes["epochs"].append(epoch)
        if notes["best"] is None or _score(epoch) > _score(notes["best"]):
            notes["best"] = epoch
            save_checkpoint(self.shipped, self.folder.path / "checkpoint-best", extra=epoch)
        log.epoch(epoch)
        self._track({f"validation/{k}": rate.rate for k, rate in found.items()}, report.step)
        self._save("checkpoint-last", notes)
        console.print(
            f"epoch {epoch['epoch']}: loss {report.loss:.3f}, undefended {percent(found['undefended'].rate)}, "
            f"certified {percent(found['certified'].rate)}",
            highlight=False,
        )

    def _save(self, name: str, notes: dict[str, Any]) -> None:
        from patchproof.training.checkpoint import save_training

        if self.accelerator.is_main_process:
            self.shipped.load_state_dict(self.trainer.weights())
            save_training(self.folder.path / name, self.trainer, self.shipped, notes)

    def _start_tracking(self) -> None:
        """Inside the run's folder, once it is this run's."""
        if self.config.track != "none":
            self.accelerator.project_configuration.set_directories(str(self.folder.path))
            self.accelerator.init_trackers("tracking")

    def _track(self, values: dict[str, float], step: int) -> None:
        self.accelerator.log(values, step=step)


def _score(epoch: dict[str, Any]) -> tuple[int, int]:
    return epoch["certified"]["k"], epoch["undefended"]["k"]


def start_accelerator(config: TrainConfig) -> Accelerator:
    from accelerate import Accelerator

    from patchproof.training.loop import MIXED

    device = choose_device(config.device)
    if device.type == "cpu" and config.precision == "fp16":
        raise InputError("--precision fp16 needs a GPU; use bf16 or fp32 on the CPU")
    if not (math.isfinite(config.checkpoint_minutes) and config.checkpoint_minutes >= 0):
        raise InputError(f"--checkpoint-minutes must be a number of at least 0, not {config.checkpoint_minutes}")
    if config.track != "none" and importlib.util.find_spec(config.track) is None:
        raise InputError(
            f"--track {config.track} needs a package that is not installed: pip install 'patchproof[track]'"
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    trackers = None if config.track == "none" else config.track
    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=MIXED[config.precision],
            log_with=trackers,
            project_dir=str(config.output or "runs"),
        )
    except (ValueError, ImportError) as error:
        raise InputError(
            f"--precision {config.precision} or --track {config.track} cannot be had here: {error}"
        ) from error
    return accelerator


def make_plan(config: TrainConfig, architecture: str) -> Plan:
    batch_size = parse_batch_size(config.batch_size)
    if batch_size is None:
        raise InputError("--batch-size auto is for certification; training needs a number, e.g. 64")
    rate = paper_learning_rate(architecture) if config.learning_rate is None else config.learning_rate
    chosen = {f.name: getattr(config, f.name) for f in fields(Plan)}
    return Plan(**chosen | {"batch_size": batch_size, "learning_rate": rate})


def training_pair(patch: str, image_size: Size) -> Any:
    threat = PatchThreat(image_size, parse_patches(patch, image_size, flag="--mask-patch"))
    return covering_masks(threat, per_axis=3), covering_masks(threat, per_axis=6)


def certify_recipe(config: TrainConfig, folder: Path, console: Console) -> None:
    """Every patch and mask set of the recipe's row, with the paper's number beside ours."""
    recipe = find_recipe(str(config.recipe))
    for expected in recipe.expectations:
        settings = CertifyConfig(
            weights=str(folder / "checkpoint-last"),
            dataset=config.validation or config.dataset,
            data_dir=config.data_dir,
            precision=config.precision,
            workers=config.workers,
            image_size=config.image_size,
            patch=expected.patch,
            masks=expected.masks,
            device=config.device,
            limit=config.limit,
            skip_bad=config.skip_bad,
            output=folder / f"certify-{expected.patch}-{expected.masks}x{expected.masks}",
            resume=True,
        )
        run = Run.begin(settings)
        console.print(results_table(run.execute(Console(stderr=True)), title=run.title))
        clean = f"clean {expected.defended:.1f}%, " if expected.defended is not None else ""
        console.print(f"the paper (Table {expected.table}): {clean}certified {expected.certified:.1f}%\n")


def default_name(config: TrainConfig, source: ImageSource, architecture: str) -> str:
    limit = f"-first{config.limit}" if config.limit else ""
    name = f"train-{source.name}-{architecture}-{config.strategy}-seed{config.seed}{limit}"
    return re.sub(r"[^A-Za-z0-9._%-]+", "_", name)
