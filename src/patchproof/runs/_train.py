"""A training: fine-tuning on masked copies into a folder that a killed run continues, bit for bit on the CPU."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from patchproof.data import FolderSource, ImageSource, as_source, iterate_batches, spread_indices
from patchproof.defenses import PatchCleanser
from patchproof.geometry import PatchThreat, covering_masks, parse_patches
from patchproof.masking import Engine, Evaluator, as_images, default_batch, evaluating
from patchproof.models import ImageClassifier, adopt, classifier_summary, match_labels, save_checkpoint, weights_sha256
from patchproof.runs._files import plain, write_atomically
from patchproof.runs._folder import RunFolder
from patchproof.runs._manifest import SCHEMA, made_with, preprocessing_facts
from patchproof.runs._record import Rate
from patchproof.runs._session import changes_since, default_workers, preprocessing_for
from patchproof.training import Plan, paper_learning_rate
from patchproof.types import InputError, Preprocessing, Size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from patchproof.training.loop import StepReport, Trainer

VALIDATED_AT_ONCE = 64


@dataclass(frozen=True)
class Trained:
    """A finished training: the classifier that was passed in, trained in place, and what results.json says."""

    classifier: Any
    results: Mapping[str, Any]
    folder: Path | None = None

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The epoch that `checkpoint-best` holds; None without validation."""
        return self.results["best"]


@dataclass(frozen=True)
class EpochReport:
    """What one epoch came to: validation accuracies, if there are validation images."""

    epoch: int
    step: int
    rates: Mapping[str, Rate] = field(default_factory=dict)


def train(
    classifier: nn.Module,
    data: Any,
    plan: Plan | None = None,
    *,
    validation: Any = None,
    folder: Path | str | None = None,
    resume: bool = False,
    on_step: Callable[[StepReport], None] | None = None,
    on_epoch: Callable[[StepReport, EpochReport], None] | None = None,
    on_start: Callable[[Trainer], None] | None = None,
    limit: int | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    keep_decoded: bool = False,
    checkpoint_minutes: float = 10.0,
    accelerator: Accelerator | None = None,
    preprocessing: Preprocessing | None = None,
    config: Mapping[str, Any] | None = None,
) -> Trained:
    """Fine-tune `classifier` in place on masked copies of the images of `data`.

    After each epoch, `validation` images are certified with 3×3 masks, and checkpoints saved: `checkpoint-last`, from
    which a killed run continues, and `checkpoint-best`, by certified accuracy. `on_step` sees each step of this call.
    With several processes (torchrun, accelerate launch), pass nothing more: each takes its own GPU.
    """
    run = TrainingRun(**locals())
    results = run.execute()
    classifier.eval()
    return Trained(classifier, results, None if run.place is None else run.place.path)


@dataclass(frozen=True)
class Validation:
    """The same images after every epoch, against the patch of the training masks with the 3×3 set."""

    source: ImageSource
    pixels: Tensor
    labels: Int64[Tensor, " n"]
    threat: PatchThreat
    device: torch.device

    @classmethod
    def on(
        cls,
        source: ImageSource,
        classifier: ImageClassifier,
        plan: Plan,
        device: torch.device,
        preprocessing: Preprocessing,
        *,
        skip_bad: bool,
    ) -> Validation:
        indices = spread_indices(source, plan.validation_images)
        batches = list(iterate_batches(source, preprocessing, indices, batch_size=VALIDATED_AT_ONCE, skip_bad=skip_bad))
        if not sum(len(b.indices) for b in batches):
            raise InputError(f"none of the {len(indices)} validation images can be read")
        labels = torch.cat([b.labels for b in batches])
        if source.class_names:
            labels = torch.tensor(match_labels(source.class_names, classifier))[labels]
        size = classifier.input_size
        threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
        return cls(source, torch.cat([b.images for b in batches]), labels, threat, device)

    def measure(self, classifier: ImageClassifier) -> dict[str, Rate]:
        masks = covering_masks(self.threat, per_axis=3)
        defense = PatchCleanser(classifier.eval(), masks, self.threat, engine=Engine())
        evaluator = Evaluator(classifier, Engine())
        counts = {"undefended": 0, "certified": 0}
        for pixels, labels in zip(
            self.pixels.split(VALIDATED_AT_ONCE), self.labels.split(VALIDATED_AT_ONCE), strict=True
        ):
            images, wanted = as_images(pixels, self.device), labels.to(self.device)
            counts["undefended"] += int((evaluator.labels(images) == wanted).sum())
            counts["certified"] += int(defense.certify(images, wanted).certified.sum())
        return {name: Rate(count, len(self.labels)) for name, count in counts.items()}


class TrainingLog:
    """log.jsonl: one line per step and one per epoch, so that curves can be drawn while it grows."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")

    def cut_after(self, step: int) -> None:
        """Forget the steps after the checkpoint, which will be done again, and a line cut short by a kill."""
        if self.path is None or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text("utf-8", errors="replace").splitlines():
            try:
                if int(json.loads(line)["step"]) <= step:
                    kept.append(line)
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                continue
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))


@dataclass
class TrainingRun:
    """One call of `train`: what learns, from what, into which folder. Only the main process writes."""

    classifier: nn.Module
    data: Any
    plan: Plan | None
    validation: Any
    folder: Path | str | None
    resume: bool
    on_step: Callable[[StepReport], None] | None
    on_epoch: Callable[[StepReport, EpochReport], None] | None
    on_start: Callable[[Trainer], None] | None
    limit: int | None
    workers: int | None
    skip_bad: bool
    keep_decoded: bool
    checkpoint_minutes: float
    accelerator: Accelerator | None
    preprocessing: Preprocessing | None
    config: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        from patchproof.training.loop import Trainer, TrainingData, start_accelerator

        plan, source = Plan() if self.plan is None else self.plan, as_source(self.data)
        if not isinstance(self.classifier, nn.Module) or not any(True for _ in self.classifier.parameters()):
            raise InputError(f"train needs an nn.Module with parameters, not {type(self.classifier).__name__}")
        if not isinstance(plan, Plan):
            raise InputError(f"plan must be a Plan, e.g. Plan(strategy='greedy'), not {plan!r}")
        accelerator = self.accelerator or start_accelerator(plan, next(self.classifier.parameters()).device)
        network = _as_image_classifier(self.classifier, source)
        size = network.input_size
        rate = paper_learning_rate(network.architecture) if plan.learning_rate is None else plan.learning_rate
        self.settled = replace(plan, learning_rate=rate)
        data = TrainingData(
            source,
            spread_indices(source, self.limit),
            torch.tensor(match_labels(source.class_names, network)) if source.class_names else None,
            self.preprocessing or preprocessing_for(network, source.low_resolution, size),
            workers=self.workers or default_workers(),
            skip_bad=self.skip_bad,
            keep_decoded=self.keep_decoded,
        )
        self.shipped = copy.deepcopy(network).to(accelerator.device)
        # A copy that is only evaluated takes a fraction of the memory of one that is learned from, so up to four times
        # as many as the step has at once still need less than the step (benchmarks/README.md). Twice as many suit
        # `greedy`, which evaluates 9, 4, 8 and 4 copies of each image in turn: hardly a chunk is left half empty.
        copies = max(1, 2 * plan.batch_size // plan.accumulate // accelerator.num_processes)
        chunk = min(2 * copies, default_batch(size, accelerator.device))
        threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
        masks = covering_masks(threat, per_axis=3), covering_masks(threat, per_axis=6)
        self.trainer = Trainer(network, data, self.settled, accelerator=accelerator, masks=masks, chunk=chunk)
        self.held_out = None
        if self.validation is not None:
            other = as_source(self.validation)
            how = self.preprocessing or preprocessing_for(network, other.low_resolution, size)
            self.held_out = Validation.on(other, self.shipped, plan, accelerator.device, how, skip_bad=self.skip_bad)
        self.place = None if self.folder is None else RunFolder(Path(self.folder))

    @property
    def writes(self) -> bool:
        return self.place is not None and self.trainer.accelerator.is_main_process

    def manifest(self) -> dict[str, Any]:
        """`shipped` still has the weights that training begins with."""
        data, accelerator, strategy = self.trainer.data, self.trainer.accelerator, self.trainer.strategy
        return {
            "schema": SCHEMA,
            "command": "train",
            "config": dict(self.config or {}),
            "identity": plain(
                {
                    "weights_sha256": weights_sha256(self.shipped),
                    "data_sha256": data.source.listing_sha256(data.indices),
                    "validation_sha256": self.held_out and self.held_out.source.listing_sha256(),
                    "images": f"{len(data.indices)} of {len(data.source)}",
                    "preprocessing": preprocessing_facts(data.preprocessing),
                    "plan": self.settled.describe(),
                    "skip_bad": data.skip_bad,
                    "device": accelerator.device.type,
                    "steps": self.trainer.total_steps,
                }
            ),
            "model": classifier_summary(self.shipped),
            "search": {kind: getattr(strategy, kind, None) for kind in ("forwards", "backwards")},
            "steps": self.trainer.total_steps,
            "processes": accelerator.num_processes,
            "precision": self.settled.precision,
            **made_with(accelerator.device),
        }

    def execute(self) -> dict[str, Any]:
        """Train what is not trained yet."""
        from patchproof.training.checkpoint import load_training

        trainer, folder = self.trainer, self.place
        manifest = self.manifest()
        opened = folder.open(manifest, resume=self.resume) if folder is not None and self.writes else nullcontext()
        with opened:
            resumed = None if folder is None else load_training(folder.path / "checkpoint-last", trainer)
            notes = dict(resumed.notes) if resumed else {"epochs": [], "best": None, "seconds": 0.0}
            log = TrainingLog(folder.path / "log.jsonl" if folder is not None and self.writes else None)
            log.cut_after(trainer.step)
            if self.on_start is not None:
                self.on_start(trainer)
            for report in self._steps(notes):
                log.add("step", asdict(report))
                ended = report.step % trainer.steps_per_epoch == 0
                epoch = self._finish_epoch(report, notes, log) if ended else None
                try:
                    if self.on_step is not None:
                        self.on_step(report)
                    if epoch is not None and self.on_epoch is not None:
                        self.on_epoch(report, epoch)
                except BaseException:
                    if not ended:  # a step that was seen is on disk
                        self._save(notes)
                    raise
            self.shipped.load_state_dict(trainer.weights())
            trainer.classifier.load_state_dict(trainer.weights())
            results = {"schema": SCHEMA, "status": "complete", "best": notes["best"], **notes}
            results["weights_sha256"] = weights_sha256(self.shipped)
            if folder is not None and self.writes:
                for doubt in self._changes(manifest["identity"]):
                    folder.spoil(doubt)
                folder.write_results(results)
        trainer.accelerator.end_training()
        return results

    def _steps(self, notes: dict[str, Any]) -> Iterator[StepReport]:
        """The reports of the run; between epochs a checkpoint is saved now and then."""
        saved = clock = time.monotonic()
        for report in self.trainer.run():
            notes["seconds"] += time.monotonic() - clock
            clock = time.monotonic()
            yield report
            if clock - saved > 60 * self.checkpoint_minutes:
                self._save(notes)
                saved = time.monotonic()

    def _finish_epoch(self, report: StepReport, notes: dict[str, Any], log: TrainingLog) -> EpochReport | None:
        """Validate, note, and save; `checkpoint-best` is chosen by certified accuracy, then by the undefended one."""
        accelerator = self.trainer.accelerator
        self.shipped.load_state_dict(self.trainer.weights())
        found: dict[str, Rate] = {}
        if accelerator.is_main_process and self.held_out is not None:
            found = self.held_out.measure(self.shipped)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return None
        if found:
            epoch = {"epoch": report.epoch + 1, "step": report.step, **{k: r.as_dict() for k, r in found.items()}}
            notes["epochs"].append(epoch)
            if notes["best"] is None or _score(epoch) > _score(notes["best"]):
                notes["best"] = epoch
                if self.place is not None:
                    save_checkpoint(self.shipped, self.place.path / "checkpoint-best", extra=epoch)
            log.add("epoch", epoch)
        self._save(notes)
        return EpochReport(report.epoch + 1, report.step, found)

    def _save(self, notes: dict[str, Any]) -> None:
        from patchproof.training.checkpoint import save_training

        if self.place is not None and self.writes:
            self.shipped.load_state_dict(self.trainer.weights())
            save_training(self.place.path / "checkpoint-last", self.trainer, self.shipped, notes)

    def _changes(self, identity: Mapping[str, Any]) -> list[str]:
        """Whether the images to learn from or to validate on changed since training began."""
        sources = {"data_sha256": self.trainer.data.source}
        if self.held_out is not None:
            sources["validation_sha256"] = self.held_out.source
        return [d for key, s in sources.items() if isinstance(s, FolderSource) for d in changes_since(identity[key], s)]


def _score(epoch: Mapping[str, Any]) -> tuple[int, int]:
    return epoch["certified"]["k"], epoch["undefended"]["k"]


def _as_image_classifier(classifier: nn.Module, source: ImageSource) -> ImageClassifier:
    """The classifier itself, or a module of the user's own wrapped, whose input is the size of its first image."""
    if isinstance(classifier, ImageClassifier):
        return classifier
    if not len(source):
        raise InputError("there are no images to train on")
    first: Any = source.load(0)
    own: Size = (first.shape[-2], first.shape[-1]) if isinstance(first, Tensor) else (first.height, first.width)
    size: Size = getattr(classifier, "input_size", None) or own
    channels = first.shape[0] if isinstance(first, Tensor) else 3
    with torch.no_grad(), evaluating(classifier):
        logits = classifier(torch.zeros(1, channels, *size, device=next(classifier.parameters()).device))
    return adopt(classifier, input_size=size, num_classes=int(logits.shape[1]), channels=channels)
