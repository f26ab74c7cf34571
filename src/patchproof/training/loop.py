"""Fine-tuning on masked copies.

A step depends only on the seed, its number, the state before it and the number of processes, so resuming on as many
processes changes no bit of the result.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchproof.data import Batch, Decoded, ImageSource, iterate_batches
from patchproof.geometry import PatchThreat, parse_patches
from patchproof.masking import Engine, MaskedForward, images_ahead, label_range, network, require_classes, tf32
from patchproof.models import ImageClassifier, seeded
from patchproof.training.augment import flip_and_crop, flip_and_shift
from patchproof.training.losses import LOSSES, StepLoss, Teacher
from patchproof.training.memory import merged, state_of
from patchproof.training.plan import Plan
from patchproof.training.recorded import RecordedPass
from patchproof.training.strategies import MaskingStrategy, MaskPair, checked, masking_strategy
from patchproof.types import CheckError, InputError, Preprocessing


def start_accelerator(plan: Plan, device: torch.device, *, log_with: str | None = None) -> Accelerator:
    """Set up Accelerate for this plan and kind of device; each of several processes takes its own GPU."""
    if device.type == "cpu" and plan.precision == "fp16":
        raise InputError("precision fp16 needs a GPU; use bf16 or fp32 on the CPU")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    # Forget the precision and device of an earlier training; but several processes can form a group only once.
    AcceleratorState._reset_state(reset_partial_state=os.environ.get("WORLD_SIZE", "1") == "1")
    mixed = plan.precision if plan.precision in ("bf16", "fp16") else "no"
    try:
        return Accelerator(cpu=device.type == "cpu", mixed_precision=mixed, log_with=log_with)
    except (ValueError, ImportError) as error:
        raise InputError(f"precision {plan.precision} or tracking with {log_with} is not possible: {error}") from error


@dataclass(frozen=True)
class StepReport:
    """Report of one optimiser step; `loss` is the mean over all processes, `images` and times are this process's."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    images: int
    seconds: float
    search_seconds: float


@dataclass(frozen=True)
class TrainingData:
    """Images to learn from; `classes[label]` is the classifier's output for a label of the source, by default equal."""

    source: ImageSource
    indices: Sequence[int]
    classes: Int64[Tensor, " labels"] | None
    preprocessing: Preprocessing
    workers: int = 2
    skip_bad: bool = False
    keep_decoded: bool = False


class Trainer:
    """A training in progress: `run` yields a report after every step, and begins at `step`."""

    def __init__(
        self,
        classifier: ImageClassifier,
        data: TrainingData,
        plan: Plan,
        *,
        accelerator: Accelerator,
        masks: MaskPair | None = None,
        chunk: int = 256,
    ) -> None:
        self.plan, self.data, self.accelerator = plan, data, accelerator
        self.classifier = classifier.to(memory_format=torch.channels_last)
        self.steps_per_epoch = _steps_per_epoch(classifier, plan, len(data.indices), accelerator.num_processes)
        size = classifier.input_size
        patch = PatchThreat(size, parse_patches(plan.mask_patch, size))
        loss = LOSSES[plan.loss](classifier, patch) if isinstance(plan.loss, str) else plan.loss
        teacher = None if plan.teacher is None else _teacher(plan, classifier, accelerator.device)
        one_process = accelerator.num_processes == plan.accumulate == 1
        masked = MaskedForward(classifier)
        if plan.compile and accelerator.device.type == "cuda" and one_process and not classifier.drop_tokens:
            masked = RecordedPass(classifier, plan.batch_size)
        step_loss = StepLoss(
            classifier,
            masked,
            loss,
            teacher,
            teacher_weight=plan.teacher_weight,
            smoothing=plan.label_smoothing,
            # The loss `ibp` draws another number of windows in every step, so it would be compiled again.
            compiled=plan.compile and plan.loss == "bagcert",
        )
        self.generator = torch.Generator()
        self.strategy: MaskingStrategy
        if isinstance(plan.strategy, str):
            engine = Engine(batch_size=chunk, precision=plan.precision, compile=plan.compile)
            options = {"masks": masks, "engine": engine, **plan.strategy_options()}
            self.strategy = masking_strategy(plan.strategy, image_size=size, generator=self.generator, **options)
        else:
            self.strategy = plan.strategy
            state_of(self.strategy)  # refuses at once a memory that could not be saved
        self.trainable = [(p, p.requires_grad) for p in classifier.parameters()]
        if plan.head_only:
            head = _head(classifier)
            classifier.requires_grad_(False)  # after all that may be refused, which then leaves nothing frozen
            head.requires_grad_(True)
        trained = [p for p in classifier.parameters() if p.requires_grad]
        sgd = partial(torch.optim.SGD, momentum=plan.momentum)
        chosen = torch.optim.AdamW if plan.optimizer == "adamw" else sgd
        optimizer = chosen(trained, lr=plan.rate(0), weight_decay=plan.weight_decay)
        self.model, self.optimizer = accelerator.prepare(step_loss, optimizer)
        begun = {k: v.detach().clone() for k, v in classifier.state_dict().items()}
        self.start = begun if plan.start_share else None
        self.average = {k: v.clone() for k, v in begun.items()} if plan.ema else None
        self.decoded = Decoded() if data.keep_decoded else None
        self.step = 0

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.plan.epochs

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to validate and ship.

        They are the running average, if there is one, mixed with the first weights if `start_share` says so (WiSE-FT,
        Wortsman et al. 2022).
        """
        found = self.average if self.average is not None else self.classifier.state_dict()
        if self.start is None:
            return found
        share = self.plan.start_share
        return {k: v.lerp(self.start[k], share) if v.is_floating_point() else v for k, v in found.items()}

    def close(self) -> None:
        """Hand the classifier back in eval mode, with the same parameters trainable as before."""
        for parameter, before in self.trainable:
            parameter.requires_grad_(before)
        self.classifier.eval()

    def run(self) -> Iterator[StepReport]:
        """Train from `self.step` to the end."""
        while self.step < self.total_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            batches = ((batch, batch.images) for batch in self._batches(epoch, skip=done))
            for batch, images in images_ahead(batches, self.accelerator.device):
                yield self._train_on(batch, images, epoch)

    def _batches(self, epoch: int, *, skip: int) -> Iterator[Batch]:
        """Yield this process's share of each batch of the epoch, from batch `skip` on."""
        data, size = self.data, self.plan.batch_size
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        generator = torch.Generator().manual_seed(_mixed(self.plan.seed, epoch, 1))
        order = torch.randperm(len(data.indices), generator=generator)
        batches = order[: self.steps_per_epoch * size].split(size)[skip:]
        mine = [data.indices[i] for i in torch.cat([batch[rank::world] for batch in batches]).tolist()]
        options = {"batch_size": size // world, "workers": data.workers, "skip_bad": data.skip_bad}
        return iterate_batches(data.source, data.preprocessing, mine, kept=self.decoded, **options)

    def _train_on(self, batch: Batch, images: Tensor, epoch: int) -> StepReport:
        started = time.perf_counter()
        if len(batch.indices) < min(2, self.plan.batch_size // self.accelerator.num_processes):
            raise CheckError(
                f"step {self.step + 1}: {len(batch.bad)} images of its batch cannot be read, too few are left"
            )
        labels = batch.labels if self.data.classes is None else self.data.classes[batch.labels]
        require_classes(label_range(labels), self.classifier.num_classes)
        if self.accelerator.num_processes > 1:
            # A checkpoint holds the main process's BatchNorm statistics, so every process searches with these.
            for buffer in self.classifier.buffers():
                torch.distributed.broadcast(buffer, src=0)
        rate = self.plan.rate(self.step / self.steps_per_epoch)
        # Masks, augmentation and dropout are drawn from the seed and the step.
        seed = _mixed(self.plan.seed, self.step, 2 + self.accelerator.process_index)
        self.generator.manual_seed(seed)
        with seeded(seed, images.device if images.is_cuda else None), tf32(self.plan.precision != "fp32"):
            mirrored = None
            if self.plan.augment != "none":
                augmented = flip_and_crop if self.plan.augment == "light" else flip_and_shift
                images, mirrored = augmented(images, self.generator)
            if hasattr(self.strategy, "mirrored"):
                self.strategy.mirrored = mirrored
            labels, indices = labels.to(images.device), torch.tensor(batch.indices, device=images.device)
            shared = self.accelerator.num_processes > 1 and hasattr(self.strategy, "state_dict")
            remembered = state_of(self.strategy) if shared else {}
            self.classifier.eval()
            before = _moment(images.device)
            keep = checked(self.strategy(self.classifier, images, labels, indices=indices, epoch=epoch), images)
            after = _moment(images.device)
            loss, losses = self._update(images, labels, keep, rate)  # waits for the device, and so for both moments
            searched = before.elapsed_time(after) / 1000 if images.is_cuda else after - before
            if hasattr(self.strategy, "observe"):
                self.strategy.observe(losses, indices=indices)
            if shared:  # give all processes the same memory
                states = gather_object([state_of(self.strategy)])
                self.strategy.load_state_dict(merged(remembered, states))  # type: ignore[attr-defined]
        if self.average is not None:
            decay = min(self.plan.ema, (1 + self.step) / (10 + self.step))
            state = self.classifier.state_dict()
            moving = [name for name, value in state.items() if value.is_floating_point()]
            # One call for all weights, because single launches would take longer than the work.
            torch._foreach_lerp_([self.average[name] for name in moving], [state[name] for name in moving], 1 - decay)
            for name in state.keys() - moving:
                self.average[name].copy_(state[name])
        self.step += 1
        return StepReport(self.step, epoch, loss, rate, len(images), time.perf_counter() - started, searched)

    def _update(
        self, images: Tensor, labels: Tensor, keep: Tensor, rate: float
    ) -> tuple[float, Float[Tensor, "copies b"]]:
        """Take one optimiser step on the mean loss over images and copies; return it, and the loss of each copy."""
        chosen = len(keep)
        if self.plan.clean_copies:
            keep = torch.cat([torch.ones_like(keep[:1]), keep])
        # Frozen layers stay in eval mode: their normalisation statistics are frozen too.
        self.classifier.train(not self.plan.head_only)
        if self.plan.head_only:
            _head(self.classifier).train()
        # A strategy or the caller may have left gradients, which are not this step's.
        self.optimizer.zero_grad(set_to_none=True)
        processes, total = self.accelerator.num_processes, len(images)
        if processes > 1:
            total = int(self.accelerator.reduce(torch.tensor(float(total), device=images.device), "sum"))
        # With unequal shares, gradients averaged over processes would weigh images unequally; this undoes it.
        weight = processes / total
        # At least two images per part, even if the last batch is short; the same number of parts on every process.
        count = max(1, min(self.plan.accumulate, total // processes // 2))
        split = images.tensor_split(count), labels.tensor_split(count), keep.tensor_split(count, dim=1)
        loss, losses, progress = torch.zeros((), device=images.device), [], self.step / self.total_steps
        for number, part in enumerate(zip(*split, strict=True), start=1):
            with nullcontext() if number == count else self.accelerator.no_sync(self.model):
                mean_loss, copy_losses = self.model(*part, progress)
                summed = mean_loss * len(part[0]) * weight
                self.accelerator.backward(summed)
            losses.append(copy_losses[-chosen:])
            loss += summed.detach() / processes
        mean = float(self.accelerator.reduce(loss, "sum"))
        if not math.isfinite(mean):
            raise CheckError(
                f"the loss became {mean} at step {self.step + 1}; a checkpoint saved before, if any, is kept: "
                f"lower the learning rate{', or use precision bf16' if self.plan.precision == 'fp16' else ''}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean, torch.cat(losses, dim=1)


def _moment(device: torch.device) -> Any:
    """The current time on the device, recorded without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _mixed(*numbers: int) -> int:
    """Mix several numbers into one seed (SplitMix64), so that each of them changes all bits."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state % 2**63


def _teacher(plan: Plan, classifier: ImageClassifier, device: torch.device) -> Teacher:
    """The plan's teacher, with its outputs in the order of the classifier's."""
    size = getattr(plan.teacher, "input_size", None)
    if size not in (None, classifier.input_size):
        raise InputError(
            f"the teacher takes images of {size}, the network {classifier.input_size}; "
            "give input_size to load both alike"
        )
    own, known = classifier.class_names, getattr(plan.teacher, "class_names", None)
    teacher = plan.teacher.to(device).eval() if isinstance(plan.teacher, nn.Module) else plan.teacher
    answer = network(teacher, precision=plan.precision)
    count = answer(torch.zeros(1, len(classifier.shift), *classifier.input_size, device=device), None).shape[1]
    outputs = torch.arange(classifier.num_classes)
    if own is not None and known is not None:
        missing = [name for name in own if name not in known]
        if missing:
            raise InputError(f"the teacher lacks {len(missing)} of the network's {len(own)} classes, e.g. {missing[0]}")
        outputs = torch.tensor([known.index(name) for name in own])
    elif count != classifier.num_classes:
        raise InputError(f"the teacher has {count} classes, the network {classifier.num_classes}")
    outputs = outputs.to(device)
    return lambda images, keep: answer(images, keep)[:, outputs]


def _head(classifier: ImageClassifier) -> nn.Module:
    head = getattr(classifier.module, "get_classifier", None)
    if head is None:
        raise InputError("head_only needs a network with get_classifier(), as timm's have")
    return head()


def _steps_per_epoch(classifier: nn.Module, plan: Plan, images: int, processes: int) -> int:
    """Number of batches per epoch; a last one too small to give every process two images is left out."""
    if plan.batch_size % processes:
        raise InputError(f"batch_size {plan.batch_size} does not divide among {processes} processes")
    smallest = plan.batch_size // processes // plan.accumulate
    normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in classifier.modules())
    if smallest < 2 and normalises and not plan.head_only:
        raise InputError(
            "BatchNorm cannot learn from batches of one image; choose a larger batch_size, or a smaller number of "
            "parts (accumulate)"
        )
    whole, rest = divmod(images, plan.batch_size)
    steps = whole + (rest >= 2 * processes)
    if not steps:
        least = min(2 * processes, plan.batch_size)
        raise InputError(f"{images} training images are too few for one batch; give at least {least}")
    return steps
