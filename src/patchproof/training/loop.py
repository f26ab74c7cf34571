"""Fine-tuning on masked copies. A step depends on nothing but the seed, its number and the weights before it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.data import Batch, Decoded, ImageSource, iterate_batches
from patchproof.geometry import PatchThreat, parse_patches
from patchproof.masking import (
    Engine,
    MaskedForward,
    images_ahead,
    label_range,
    network,
    require_classes,
    tf32,
)
from patchproof.models import ImageClassifier
from patchproof.training.losses import LOSSES, Loss
from patchproof.training.memory import merged, state_of
from patchproof.training.plan import Plan
from patchproof.training.recorded import RecordedPass
from patchproof.training.strategies import MaskingStrategy, MaskPair, checked, masking_strategy
from patchproof.types import CheckError, InputError, Preprocessing

Teacher = Callable[[Tensor, Tensor | None], Tensor]
"""(images, keep) -> logits to learn from."""

MIXED = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}

SMALLEST_AREA = 0.5
"""A random crop keeps at least this share of the image."""


def start_accelerator(plan: Plan, device: torch.device, *, log_with: str | None = None) -> Accelerator:
    """Accelerate for this plan on this kind of device; with several processes, each takes its own GPU."""
    if device.type == "cpu" and plan.precision == "fp16":
        raise InputError("precision fp16 needs a GPU; use bf16 or fp32 on the CPU")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    # An earlier training's precision and device are its own; several processes meet only once.
    AcceleratorState._reset_state(reset_partial_state=os.environ.get("WORLD_SIZE", "1") == "1")
    try:
        return Accelerator(cpu=device.type == "cpu", mixed_precision=MIXED[plan.precision], log_with=log_with)
    except (ValueError, ImportError) as error:
        raise InputError(f"precision {plan.precision} or tracking with {log_with} is not possible: {error}") from error


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did; `loss` is the mean over all processes."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    images: int
    seconds: float
    search_seconds: float


@dataclass(frozen=True)
class TrainingData:
    """Images to learn from: `classes[label]` is the classifier's output for a label of the source; None: the same."""

    source: ImageSource
    indices: Sequence[int]
    classes: Int64[Tensor, " labels"] | None
    preprocessing: Preprocessing
    workers: int = 2
    skip_bad: bool = False
    keep_decoded: bool = False


class Trainer:
    """Owns the weights while they change; `run` yields a report after every step, and can begin at any step."""

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
        if plan.head_only:
            classifier.requires_grad_(False)
            _head(classifier).requires_grad_(True)
        trained = [p for p in classifier.parameters() if p.requires_grad]
        rate, decay = plan.rate(0), plan.weight_decay
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=rate, momentum=plan.momentum, weight_decay=decay)
        if plan.optimizer == "adamw":
            optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
        patch = PatchThreat(classifier.input_size, parse_patches(plan.mask_patch, classifier.input_size))
        loss = LOSSES[plan.loss](classifier, patch) if isinstance(plan.loss, str) else plan.loss
        teacher = None if plan.teacher is None else _teacher(plan, classifier, accelerator.device)
        recorded = (
            plan.compile and accelerator.device.type == "cuda" and accelerator.num_processes == plan.accumulate == 1
        )
        masked = MaskedForward(classifier)
        if recorded and not classifier.drop_tokens:
            masked = RecordedPass(classifier, plan.batch_size)
        step_loss = StepLoss(classifier, masked, plan, loss, teacher)
        self.model, self.optimizer = accelerator.prepare(step_loss, optimizer)
        self.generator = torch.Generator()
        self.strategy: MaskingStrategy
        if isinstance(plan.strategy, str):
            engine = Engine(batch_size=chunk, precision=plan.precision, compile=plan.compile)
            size = classifier.input_size
            options = plan.strategy_options()
            self.strategy = masking_strategy(
                plan.strategy, image_size=size, generator=self.generator, masks=masks, engine=engine, **options
            )
        else:
            self.strategy = plan.strategy
            state_of(self.strategy)  # refuses at once what could not be saved
        begun = {k: v.detach().clone() for k, v in classifier.state_dict().items()}
        self.start = begun if plan.start_share else None
        self.average = {k: v.clone() for k, v in begun.items()} if plan.ema else None
        self.decoded = Decoded() if data.keep_decoded else None
        self.step = 0

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.plan.epochs

    def weights(self) -> dict[str, Tensor]:
        """The weights to validate and ship: the running average if there is one, mixed with those it began with if so
        planned (WiSE-FT, Wortsman et al. 2022)."""
        found = self.average if self.average is not None else self.classifier.state_dict()
        if self.start is None:
            return found
        share = self.plan.start_share
        return {k: v.lerp(self.start[k], share) if v.is_floating_point() else v for k, v in found.items()}

    def run(self) -> Iterator[StepReport]:
        """Train from `self.step` to the end."""
        while self.step < self.total_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            batches = ((batch, batch.images) for batch in self._batches(epoch, skip=done))
            for batch, images in images_ahead(batches, self.accelerator.device):
                yield self._train_on(batch, images, epoch)

    def _batches(self, epoch: int, *, skip: int) -> Iterator[Batch]:
        """This process's share of each batch of the epoch, from batch `skip` on."""
        generator = torch.Generator().manual_seed(_mixed(self.plan.seed, epoch, 1))
        order = torch.randperm(len(self.data.indices), generator=generator)
        batches = order[: self.steps_per_epoch * self.plan.batch_size].split(self.plan.batch_size)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = torch.cat([batch[rank::world] for batch in batches[skip:]])
        return iterate_batches(
            self.data.source,
            self.data.preprocessing,
            [self.data.indices[i] for i in mine.tolist()],
            batch_size=self.plan.batch_size // world,
            workers=self.data.workers,
            skip_bad=self.data.skip_bad,
            kept=self.decoded,
        )

    def _train_on(self, batch: Batch, images: Tensor, epoch: int) -> StepReport:
        started = time.perf_counter()
        if len(batch.indices) < min(2, self.plan.batch_size // self.accelerator.num_processes):
            raise CheckError(
                f"step {self.step + 1}: {len(batch.bad)} images of its batch cannot be read, too few are left"
            )
        labels = batch.labels if self.data.classes is None else self.data.classes[batch.labels]
        require_classes(label_range(labels), self.classifier.num_classes)
        if self.accelerator.num_processes > 1:
            # Every process searches with the main one's BatchNorm statistics, which are those a checkpoint holds.
            for buffer in self.classifier.buffers():
                torch.distributed.broadcast(buffer, src=0)
        rate = self.plan.rate(self.step / self.steps_per_epoch)
        with self._randomness_of_step(), tf32(self.plan.precision != "fp32"):
            mirrored = None
            if self.plan.augment != "none":
                augment = {"light": flip_and_crop, "shift": flip_and_shift}[self.plan.augment]
                images, mirrored = augment(images, self.generator)
            if hasattr(self.strategy, "mirrored"):
                self.strategy.mirrored = mirrored
            labels, indices = labels.to(images.device), torch.tensor(batch.indices, device=images.device)
            shared = self.accelerator.num_processes > 1 and hasattr(self.strategy, "state_dict")
            remembered = state_of(self.strategy) if shared else {}
            before = _moment(images.device)
            keep = checked(self.strategy(self.classifier, images, labels, indices=indices, epoch=epoch), images)
            after = _moment(images.device)
            loss, losses = self._update(images, labels, keep, rate)
            if hasattr(self.strategy, "observe"):
                self.strategy.observe(losses, indices=indices)
            if shared:  # what the strategy remembers is the same on all processes
                states = gather_object([state_of(self.strategy)])
                self.strategy.load_state_dict(merged(remembered, states))  # type: ignore[attr-defined]
        self._update_average()
        self.step += 1
        seconds = time.perf_counter() - started
        return StepReport(self.step, epoch, loss, rate, len(images), seconds, _seconds_between(before, after))

    @contextmanager
    def _randomness_of_step(self) -> Iterator[None]:
        """Masks, augmentation and dropout drawn from the seed and the number of the step, so that a resumed run draws
        the same; outside, the random state is the caller's."""
        seed = _mixed(self.plan.seed, self.step, 2 + self.accelerator.process_index)
        self.generator.manual_seed(seed)
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a traceback for each absent device
            if devices:
                torch.cuda.manual_seed(seed)
            yield

    def _update(
        self, images: Tensor, labels: Tensor, keep: Tensor, rate: float
    ) -> tuple[float, Float[Tensor, "copies b"]]:
        """One optimiser step on the mean loss over images and copies, in parts; that loss, and those of the copies."""
        chosen = len(keep)
        if self.plan.clean_copies:
            keep = torch.cat([torch.ones_like(keep[:1]), keep])
        # Frozen layers stay in eval mode: their normalisation statistics are frozen too.
        self.classifier.train(not self.plan.head_only)
        if self.plan.head_only:
            _head(self.classifier).train()
        processes, total = self.accelerator.num_processes, len(images)
        if processes > 1:
            total = int(self.accelerator.reduce(torch.tensor(float(total), device=images.device), "sum"))
        # With unequal shares, gradients averaged over processes would weigh images unequally; this undoes it.
        weight = processes / total
        # At least two images a part, also of a short last batch; the same number of parts on every process.
        count = max(1, min(self.plan.accumulate, total // processes // 2))
        parts = zip(
            images.tensor_split(count), labels.tensor_split(count), keep.tensor_split(count, dim=1), strict=True
        )
        loss, losses, progress = torch.zeros((), device=images.device), [], self.step / self.total_steps
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == count else self.accelerator.no_sync(self.model):
                mean_loss, copy_losses = self.model(*part, progress)
                summed = mean_loss * len(part[0]) * weight
                self.accelerator.backward(summed)
            losses.append(copy_losses[-chosen:])
            loss += summed.detach() / processes
        mean = float(self.accelerator.reduce(loss, "sum"))
        if not math.isfinite(mean):
            raise CheckError(
                f"the loss became {mean} at step {self.step + 1}; a checkpoint saved before is kept: lower the "
                "learning rate, or use precision bf16 instead of fp16"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean, torch.cat(losses, dim=1)

    def _update_average(self) -> None:
        if self.average is None:
            return
        decay = min(self.plan.ema, (1 + self.step) / (10 + self.step))
        state = self.classifier.state_dict()
        moving = [name for name, value in state.items() if value.is_floating_point()]
        # All at once: one by one, their launches take longer than they do.
        torch._foreach_lerp_([self.average[name] for name in moving], [state[name] for name in moving], 1 - decay)
        for name in state.keys() - moving:
            self.average[name].copy_(state[name])


class StepLoss(nn.Module):
    """The loss of a part of a batch as a module's forward pass, for what wraps modules: DistributedDataParallel, mixed
    precision."""

    def __init__(
        self,
        classifier: ImageClassifier,
        masked: MaskedForward,
        plan: Plan,
        loss: Loss | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.classifier, self.masked = classifier, masked
        self.plan, self.loss, self.teacher = plan, loss, teacher
        self.of_whole_batch: Any = loss
        self.largest = 0
        # Not that of `ibp`: it changes with the progress, and would be compiled again in every step.
        if plan.compile and plan.loss == "bagcert":
            self.of_whole_batch = torch.compile(cast(Any, loss).__call__, dynamic=False)

    def forward(
        self, images: Tensor, labels: Tensor, keep: Tensor, progress: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "copies b"]]:
        """The mean, and the loss of each copy; a loss on whole images has none of its own for them."""
        if self.loss is None:
            return masked_loss(
                self.masked,
                images,
                labels,
                keep,
                smoothing=self.plan.label_smoothing,
                teacher=self.teacher,
                teacher_weight=self.plan.teacher_weight,
            )
        self.largest = max(self.largest, len(images))
        loss: Any = self.of_whole_batch if len(images) == self.largest else self.loss
        mean = loss(self.classifier, images, labels, progress)
        return mean, mean.detach().expand(keep.shape[:2])


def masked_loss(
    model: MaskedForward,
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    keep: Bool[Tensor, "copies b 1 h w"],
    *,
    smoothing: float = 0.0,
    teacher: Teacher | None = None,
    teacher_weight: float = 0.5,
) -> tuple[Float[Tensor, ""], Float[Tensor, "copies b"]]:
    """Mean cross-entropy over the masked copies, and that of each copy; the clean image is not in it.

    With a teacher T, (1 − w)·CE + w·KL(T(x ⊙ m) ‖ F(x ⊙ m)): it answers for the very copies that are learned from.
    """
    every = torch.arange(len(images), device=images.device).repeat(len(keep))  # indexing keeps channels last
    logits = model(images[every], keep.flatten(0, 1)).float()
    plain = functional.cross_entropy(logits.detach(), labels[every], reduction="none").view(keep.shape[:2])
    loss = functional.cross_entropy(logits, labels[every], label_smoothing=smoothing)
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(images[every], keep.flatten(0, 1)).clone().log_softmax(dim=1)
        divergence = functional.kl_div(logits.log_softmax(dim=1), wanted, reduction="batchmean", log_target=True)
        loss = torch.lerp(loss, divergence, teacher_weight)
    return loss, plain


def flip_and_crop(
    images: Float[Tensor, "b c h w"], generator: torch.Generator
) -> tuple[Float[Tensor, "b c h w"], Bool[Tensor, " b"]]:
    """Each image mirrored with probability ½ and cut to a random part of 50 to 100% of its area, enlarged again; and
    which ones are mirrored."""
    count = len(images)
    side = (SMALLEST_AREA + (1 - SMALLEST_AREA) * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - side)[:, None]
    mirrored = torch.rand(count, generator=generator) < 0.5
    transform = torch.zeros(count, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1] = side * (1 - 2 * mirrored.float()), side
    transform[:, :, 2] = shift
    grid = functional.affine_grid(transform.to(images), list(images.shape), align_corners=False)
    found = functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return found, mirrored


def flip_and_shift(
    images: Float[Tensor, "b c h w"], generator: torch.Generator
) -> tuple[Float[Tensor, "b c h w"], Bool[Tensor, " b"]]:
    """Each image mirrored with probability ½ and shifted by up to an eighth of each side (4 of 32 pixels), reflected at
    the border; and which ones are mirrored."""
    count, sides = len(images), images.shape[-2:]

    def sources(length: int) -> Int64[Tensor, "b n"]:
        shift = torch.randint(-(length // 8), length // 8 + 1, (count, 1), generator=generator)
        place = (torch.arange(length) + shift).abs()
        return torch.minimum(place, 2 * (length - 1) - place)

    rows, columns = map(sources, sides)
    mirrored = torch.rand(count, generator=generator) < 0.5
    columns = torch.where(mirrored[:, None], sides[1] - 1 - columns, columns).to(images.device)
    every = torch.arange(count, device=images.device)[:, None, None]
    found = images.permute(0, 2, 3, 1)[every, rows.to(images.device)[:, :, None], columns[:, None]]
    return found.permute(0, 3, 1, 2), mirrored


def _moment(device: torch.device) -> float | torch.cuda.Event:
    """Now, as the device sees it; nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) or isinstance(after, float):
        return after - before  # type: ignore[operator]
    after.synchronize()
    return before.elapsed_time(after) / 1000


def _mixed(*numbers: int) -> int:
    """One seed from several numbers, each of which changes all of it (SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state % 2**63


def _teacher(plan: Plan, classifier: ImageClassifier, device: torch.device) -> Teacher:
    """The plan's teacher, its outputs in the order of the classifier's."""
    size = getattr(plan.teacher, "input_size", None)
    if size not in (None, classifier.input_size):
        raise InputError(f"the teacher takes images of {size}, the network {classifier.input_size}")
    own, known = classifier.class_names, getattr(plan.teacher, "class_names", None)
    count = getattr(plan.teacher, "num_classes", None) or classifier.num_classes
    outputs = torch.arange(classifier.num_classes)
    if own is not None and known is not None:
        if missing := [name for name in own if name not in known]:
            raise InputError(f"the teacher lacks {len(missing)} of the network's {len(own)} classes, e.g. {missing[0]}")
        outputs = torch.tensor([known.index(name) for name in own])
    elif count != classifier.num_classes:
        raise InputError(f"the teacher has {count} classes, the network {classifier.num_classes}")
    teacher = plan.teacher.to(device).eval() if isinstance(plan.teacher, nn.Module) else plan.teacher
    answer = network(teacher, precision=plan.precision)
    outputs = outputs.to(device)
    return lambda images, keep: answer(images, keep)[:, outputs]


def _head(classifier: ImageClassifier) -> nn.Module:
    head = getattr(classifier.module, "get_classifier", None)
    if head is None:
        raise InputError("head_only needs a network with get_classifier(), as timm's have")
    return head()


def _steps_per_epoch(classifier: nn.Module, plan: Plan, images: int, processes: int) -> int:
    """Batches of an epoch. A last one too small for every process to have two images is left out."""
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
        raise InputError(f"{images} training images are too few for one batch")
    return steps
