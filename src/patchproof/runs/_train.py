"""`train`: fine-tuning on masked copies, in a run folder; after a kill it continues, on the CPU bit for bit."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchproof.data import BadImageError, ImageSource, as_source, iterate_batches, require_workers, spread_indices
from patchproof.defenses import defense
from patchproof.geometry import PatchThreat, parse_patches, size_words, whole_size
from patchproof.machine import require_free
from patchproof.masking import Engine, Evaluator, as_images, default_batch, masks_for
from patchproof.models import ImageClassifier, adopt, classifier_summary, save_checkpoint, settled, weights_sha256
from patchproof.runs._folder import RunFolder, read_json, read_lines, write_atomically, write_json
from patchproof.runs._manifest import (
    SCHEMA,
    SEEN,
    changes_since,
    new_manifest,
    outputs_for,
    preprocessing_facts,
    preprocessing_for,
    require_labels,
    source_facts,
)
from patchproof.runs._measure import bare_logits
from patchproof.runs._record import Rate, Record, one_answer
from patchproof.runs.executors import default_workers
from patchproof.training import Plan, paper_learning_rate
from patchproof.types import CheckError, InputError, Preprocessing, require_kinds

if TYPE_CHECKING:
    from accelerate import Accelerator

    from patchproof.training.loop import StepReport, Trainer


SIZES_COMPARED = 16
"""Training images whose sizes are compared, if a classifier does not say its own input size."""


@dataclass(frozen=True)
class Trained:
    """A finished training: the classifier that was passed in, trained in place, and the content of results.json."""

    classifier: Any
    results: Mapping[str, Any]
    folder: Path | None = None

    @property
    def best(self) -> Mapping[str, Any] | None:
        """Accuracies of the epoch in `checkpoint-best`; None without validation."""
        return self.results["best"]


def train(
    classifier: nn.Module,
    data: Any,
    plan: Plan | None = None,
    *,
    validation: Any = None,
    test: Any = None,
    folder: Path | str | None = None,
    resume: bool = False,
    on_step: Callable[[StepReport], None] | None = None,
    on_epoch: Callable[[Mapping[str, Any]], None] | None = None,
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

    After each epoch, `validation` images are certified with the defence `plan.validate_with`, and checkpoints are
    saved: `checkpoint-last`, from which a killed run continues, and `checkpoint-best`, by certified accuracy. `test`
    are the images that the result will be tested on; the manifest records them, with a remark if they are also the
    validation images. `on_step` gets a report of each step of this call, `on_epoch` the line of log.jsonl for each
    epoch. Several processes (torchrun, accelerate launch) need no other arguments: each takes its own GPU.
    """
    from patchproof.training import loop
    from patchproof.training.checkpoint import load_training
    from patchproof.training.gradcam import named_layer

    if not isinstance(classifier, nn.Module) or not any(True for _ in classifier.parameters()):
        raise InputError(f"classifier must be an nn.Module with parameters, not {type(classifier).__name__}")
    require_kinds(train, vars(loop) | locals())  # `loop` has the types of the callbacks
    require_workers(workers)
    if not any(parameter.requires_grad for parameter in classifier.parameters()):
        raise InputError("all parameters of the classifier are frozen; thaw those to train, parameter.requires_grad_()")
    if not 0 <= checkpoint_minutes < math.inf:
        raise InputError(f"checkpoint_minutes must be a number of at least 0, not {checkpoint_minutes}")
    plan = plan or Plan()
    path = None if folder is None else Path(folder)
    accelerator = accelerator or loop.start_accelerator(plan, next(classifier.parameters()).device)
    if path is None or accelerator.is_main_process:
        require_free(path, resume=resume)
    place = RunFolder(path) if path is not None and accelerator.is_main_process else None  # only this process writes
    source = as_source(data)
    network = _as_image_classifier(classifier, source, skip_bad=skip_bad)
    if len(source.class_names) == 1:
        raise InputError(f"the training images have one class, {source.class_names[0]!r}; two are needed at least")
    if plan.gutout_layer is not None:
        named_layer(network, plan.gutout_layer)  # refuses an unknown layer before a folder is begun
    if plan.learning_rate is None:
        plan = replace(plan, learning_rate=paper_learning_rate(network.architecture))
    training_data = loop.TrainingData(
        source,
        spread_indices(source, limit),
        outputs_for(source, network),
        preprocessing or preprocessing_for(network, source.low_resolution, network.input_size),
        workers=workers or default_workers(),
        skip_bad=skip_bad,
        keep_decoded=keep_decoded,
    )
    # A copy that is only evaluated takes a fraction of the memory of one with gradients: four times as many as in a
    # training step still need less than the step (benchmarks/README.md). A round of `memory` is one chunk, because on a
    # GPU a larger chunk would be padded with useless copies.
    copies = 4 if plan.strategy != "memory" else min(4, max(plan.tries()))
    chunk = max(1, copies * plan.batch_size // plan.accumulate // accelerator.num_processes)
    chunk = min(chunk, default_batch(network.input_size, accelerator.device))
    threat = PatchThreat(network.input_size, parse_patches(plan.mask_patch, network.input_size))
    masks = masks_for(network, threat, per_axis=3), masks_for(network, threat, per_axis=6)
    shipped = copy.deepcopy(network).to(accelerator.device)
    images = {"train": source_facts(source, training_data.indices)}
    require_labels(source, training_data.indices, network.num_classes, "training ")
    validate = None
    if validation is not None:
        held_out = as_source(validation)
        validate = _validation(held_out, shipped, plan, preprocessing, skip_bad)
        images["validation"] = source_facts(held_out)
    if test is not None:
        images["test"] = source_facts(as_source(test))
    trainer = loop.Trainer(network, training_data, plan, accelerator=accelerator, masks=masks, chunk=chunk)
    with ExitStack() as stack:
        stack.enter_context(closing(trainer))
        manifest = _manifest(trainer, shipped, images, config)
        longer = partial(_goes_on_longer, plan=trainer.plan, current=manifest, folder=path)
        if place is not None:
            stack.enter_context(place.open(manifest, resume=resume, longer=longer))
        notes: dict[str, Any] = {"loss": 0.0, "images": 0, "epochs": [], "best": None, "seconds": 0.0}
        if path is not None:
            notes |= load_training(path / "checkpoint-last", trainer) or {}
        progress = Progress(None if place is None else place.path, trainer, shipped, validate, images, notes)
        if place is not None:
            cut_log(place.path / "log.jsonl", trainer.step)
        if on_start is not None:
            on_start(trainer)
        saved = clock = time.monotonic()
        for report in trainer.run():
            seconds, clock = time.monotonic() - clock, time.monotonic()
            epoch = progress.add(report, seconds)
            try:
                if epoch is not None and on_epoch is not None:
                    on_epoch(epoch)
                if on_step is not None:  # the last callback, since it may end the training
                    on_step(report)
            except BaseException:
                if epoch is None:  # the end of an epoch is saved already
                    progress.save()
                raise
            if epoch is not None:
                saved = clock
            elif clock - saved > 60 * checkpoint_minutes:
                progress.save()
                saved = time.monotonic()
        shipped.load_state_dict(trainer.weights())
        network.load_state_dict(trainer.weights())
        network.source = f"trained from {network.source.removeprefix('trained from ')}"
        network.history = {"trained_on": images["train"]}
        own = getattr(classifier, "history", None)  # a plain module may have one for purposes of its own
        if own is None or (isinstance(own, Mapping) and own and own.keys() <= SEEN.keys()):
            with suppress(AttributeError):
                classifier.history = network.history  # type: ignore[assignment]
        results = {
            "schema": SCHEMA,
            "status": "complete",
            **{name: notes[name] for name in ("best", "epochs", "seconds")},
            "weights_sha256": weights_sha256(shipped),
        }
        if place is not None:
            doubt = changes_since(manifest["identity"]["data_sha256"], source)
            if doubt is None and validation is not None:
                doubt = changes_since(manifest["identity"]["validation_sha256"], held_out)
            if doubt is not None:
                place.spoil(doubt)
                raise CheckError(doubt)
            write_json(place.path / "results.json", results)
    accelerator.end_training()
    return Trained(classifier, results, path)


@dataclass
class Progress:
    """The progress of a training, kept in log.jsonl, `checkpoint-last` and `checkpoint-best`."""

    path: Path | None
    """The run folder; None on processes that do not write."""
    trainer: Trainer
    shipped: ImageClassifier
    """A copy of the classifier with the weights to keep, for validation and checkpoints."""
    validate: Callable[[ImageClassifier], dict[str, Any]] | None
    images: Mapping[str, Mapping[str, Any]]
    notes: dict[str, Any]
    """Values saved with each checkpoint; `loss` and `images` are sums over the current epoch."""

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        if self.path is not None:
            with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")

    def add(self, report: StepReport, seconds: float) -> dict[str, Any] | None:
        """Log a step. After the last step of an epoch, validate, save checkpoints and return the epoch's facts.

        `checkpoint-best` is chosen by certified, then by undefended accuracy, among the epochs after which the network
        tells classes apart, if there are any. Only the main process returns facts.
        """
        notes, accelerator = self.notes, self.trainer.accelerator
        self.log("step", asdict(report))
        notes["seconds"] += seconds
        notes["loss"] += report.loss * report.images
        notes["images"] += report.images
        if report.step % self.trainer.steps_per_epoch:
            return None
        self.shipped.load_state_dict(self.trainer.weights())
        found: dict[str, Any] = {}
        if accelerator.is_main_process and self.validate is not None:
            found = self.validate(self.shipped)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return None
        epoch = {"epoch": report.epoch + 1, "step": report.step, "loss": notes["loss"] / notes["images"], **found}
        notes |= {"loss": 0.0, "images": 0}
        notes["epochs"].append(epoch)
        if found:
            # Compared with what `checkpoint-best` holds, not with all epochs: an earlier version chose otherwise.
            if notes["best"] is None or _rank(epoch) > _rank(notes["best"]):  # of equal epochs, the first stays
                notes["best"] = epoch
                if self.path is not None:
                    # Also of a first epoch alone: the training can go on, and choose among more.
                    seen = {"trained_on": self.images["train"], "selected_on": self.images["validation"]}
                    save_checkpoint(self.shipped, self.path / "checkpoint-best", extra=epoch | seen)
            self.log("epoch", epoch)
        self.save()
        return epoch

    def save(self) -> None:
        from patchproof.training.checkpoint import save_training

        if self.path is not None:
            self.shipped.load_state_dict(self.trainer.weights())
            history = {"trained_on": self.images["train"]}
            save_training(self.path / "checkpoint-last", self.trainer, self.shipped, self.notes, history=history)


def _rank(epoch: Mapping[str, Any]) -> tuple[bool, int, int]:
    """What the best epoch has most of; the earliest runs did not record `one_class`."""
    return not epoch.get("one_class"), epoch["certified"]["k"], epoch["undefended"]["k"]


def _manifest(
    trainer: Trainer, shipped: ImageClassifier, images: Mapping[str, Any], config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The manifest of a training; `shipped` still has the weights that it begins with."""
    data, accelerator = trainer.data, trainer.accelerator
    remarks = []
    if "test" in images and images.get("validation") == images["test"]:
        remarks.append(
            "the best epoch is chosen on the images that are also the test images "
            f"({images['test']['name']}, split {images['test']['split']}): what checkpoint-best certifies on them is "
            "optimistic; checkpoint-last is not chosen"
        )
    identity = {
        "weights_sha256": weights_sha256(shipped),
        "data_sha256": images["train"]["sha256"],
        "validation_sha256": images["validation"]["sha256"] if "validation" in images else None,
        "images": f"{len(data.indices)} of {len(data.source)}",
        "preprocessing": preprocessing_facts(data.preprocessing),
        "plan": trainer.plan.describe(),
        "device": accelerator.device.type,
        "steps": trainer.total_steps,
    }
    facts = {
        "data": images,
        "remarks": remarks,
        "model": classifier_summary(shipped),
        "search": {kind: getattr(trainer.strategy, kind, None) for kind in ("forwards", "backwards")},
        "steps": trainer.total_steps,
        "processes": accelerator.num_processes,
        "precision": trainer.plan.precision,
    }
    return new_manifest("train", config, identity, facts, accelerator.device)


def _goes_on_longer(stored: Mapping[str, Any], *, plan: Plan, current: Mapping[str, Any], folder: Path | None) -> bool:
    """True if this is the stored training with more epochs; refused if they would change the steps already done."""
    before, now = stored["identity"], current["identity"]
    if stored["command"] != "train" or not now["plan"]["epochs"] > before["plan"]["epochs"]:
        return False
    if before != {**now, "steps": before["steps"], "plan": {**now["plan"], "epochs": before["plan"]["epochs"]}}:
        return False
    each = before["steps"] // before["plan"]["epochs"], now["steps"] // now["plan"]["epochs"]
    if each[0] != each[1]:
        raise CheckError(
            f"{folder} has {each[0]} steps per epoch, here it would be {each[1]}: take as many processes as before"
        )
    state = Path() if folder is None else settled(folder / "checkpoint-last") / "training.json"
    done = int(read_json(state)["step"]) if state.exists() else 0
    per_epoch, shorter = now["steps"] // plan.epochs, replace(plan, epochs=before["plan"]["epochs"])
    reason = None
    if done and plan.loss != "cross-entropy":
        reason = "a loss that knows its progress"
    if any(plan.rate(step / per_epoch) != shorter.rate(step / per_epoch) for step in range(done)):
        reason = f"the schedule `{plan.schedule}`"
    if reason is not None:
        raise CheckError(
            f"{folder} cannot go on to {plan.epochs} epochs: with {reason} the {done} steps done depend on their "
            f"number, which was {shorter.epochs}; train its checkpoint-last on in another folder (cross-entropy with "
            "the schedule `constant` can always go on)"
        )
    return True


def _validation(
    source: ImageSource, classifier: ImageClassifier, plan: Plan, preprocessing: Preprocessing | None, skip_bad: bool
) -> Callable[[ImageClassifier], dict[str, Any]]:
    """Return a function that certifies the validation images, decoded once, against the patch of the training masks.

    It returns both accuracies, and whether the network nearly always answers one class.
    """
    size, name = classifier.input_size, plan.validate_with
    threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
    defense(name, classifier.eval(), threat)  # refuses an unsuitable classifier before any image is read
    indices = spread_indices(source, plan.validation_images)
    how = preprocessing or preprocessing_for(classifier, source.low_resolution, size)
    batches = list(iterate_batches(source, how, indices, batch_size=64, skip_bad=skip_bad))
    outputs = outputs_for(source, classifier)
    n = sum(len(batch.indices) for batch in batches)
    if not n:
        raise InputError(f"none of the {len(indices)} validation images can be read")
    require_labels(source, indices, classifier.num_classes, "validation ")

    def measure(classifier: ImageClassifier) -> dict[str, Any]:
        defended = defense(name, classifier.eval(), threat)
        evaluator, device = Evaluator(classifier, Engine()), next(classifier.parameters()).device
        certified, answered = 0, list[Record]()
        for batch in batches:
            if batch.indices:
                images = as_images(batch.images, device)
                labels = (batch.labels if outputs is None else outputs[batch.labels]).to(device)
                right = (evaluator.labels(images) == labels).tolist()
                facts = zip(batch.indices, labels.tolist(), right, strict=True)
                answered += [Record(index, "", label, undefended=found) for index, label, found in facts]
                certified += int(defended.certify(images, labels).certified.sum())
        rates = {"undefended": Rate(sum(r.undefended is True for r in answered), n), "certified": Rate(certified, n)}
        return {name: rate.as_dict() for name, rate in rates.items()} | {"one_class": one_answer(answered) is not None}

    return measure


def cut_log(path: Path, step: int) -> None:
    """Remove the steps after the checkpoint, which will be repeated, and a line cut short by a kill."""

    def done(line: str) -> str:
        return f"{line}\n" if int(json.loads(line)["step"]) <= step else ""

    if path.exists():
        kept, _ = read_lines(path.read_bytes().splitlines(), done)
        write_atomically(path, "".join(kept))


def _as_image_classifier(classifier: nn.Module, source: ImageSource, *, skip_bad: bool) -> ImageClassifier:
    """Return the classifier, or wrap another module; its input size is its own, or else that of the images."""
    if isinstance(classifier, ImageClassifier):
        return classifier
    if not len(source):
        raise InputError("there are no images to train on")
    some: list[Any] = []
    for index in spread_indices(source, SIZES_COMPARED):
        with suppress(BadImageError) if skip_bad else nullcontext():
            some.append(source.load(index))
    if not some:
        raise InputError(f"none of the {min(len(source), SIZES_COMPARED)} images looked at can be read")
    sizes = {(image.shape[-2], image.shape[-1]) if isinstance(image, Tensor) else image.size[::-1] for image in some}
    own = getattr(classifier, "input_size", None)
    size = None if own is None else whole_size(own, "classifier.input_size")
    if size is None and len(sizes) > 1:
        raise InputError(
            f"the images differ in size, e.g. {size_words(*sorted(sizes)[:2])} pixels, and the classifier does not say "
            "which size it takes; set classifier.input_size = (height, width)"
        )
    size = size or sizes.pop()
    channels = some[0].shape[0] if isinstance(some[0], Tensor) else 3
    images = torch.zeros(1, channels, *size, device=next(classifier.parameters()).device)
    classes = int(bare_logits(classifier, images).shape[1])
    return adopt(classifier, input_size=size, num_classes=classes, channels=channels)
