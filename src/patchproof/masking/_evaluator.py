"""One classifier under one engine: labels, losses and gradients of masked copies, a chunk at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.masking._arithmetic import Network, network, tf32
from patchproof.masking._logits import label_margin, label_range, require_classes, top_two
from patchproof.masking._memory import InChunks, Measured, default_batch
from patchproof.masking._objective import Aim, Views
from patchproof.settings import Engine
from patchproof.types import Classifier, InputError, Precision, TauExceededError

PARTS = (1, 4, 8)
"""Batches of fixed sizes are whole chunks, or these parts of one."""

GRADIENT_SHARE = 4
"""A pass that keeps its activations for the gradient holds so many times fewer copies than one that does not."""

GRADIENT_PARTS = (4, 2, 1)
"""The same for passes with gradients, which are never larger than one of theirs."""

SHARES = 10
"""Changes of margins are counted in so many parts of what τ allows."""

LARGEST_EXPONENT = 100
"""Slopes are scaled by at most two to this power, which float32 holds."""


class Copies(NamedTuple):
    """Masked copies to evaluate: copy j is image `image[j]` under masks `first[j]` and `second[j]` together."""

    image: Int64[Tensor, " j"]
    first: Int64[Tensor, " j"]
    second: Int64[Tensor, " j"]

    @classmethod
    def unmasked(cls, count: int) -> Copies:
        every = torch.arange(count)
        return cls(every, every, every)

    def to(self, device: torch.device) -> Copies:
        return self if self.image.device == device else Copies(*torch.stack(self).to(device, non_blocking=True))

    def chosen(self, rows: Tensor | slice) -> Copies:
        return Copies(*(t[rows] for t in self))

    def padded(self, size: int) -> Copies:
        """The last copy again and again until there are `size` of them."""
        missing = size - len(self.image)
        return self if missing <= 0 else Copies(*(torch.cat([t, t[-1:].expand(missing)]) for t in self))


class Answers(NamedTuple):
    """What F says of each copy: its label, the gap to the runner-up, the margin of the label asked about, and the
    passes that took (more than 1 where the label was decided again)."""

    label: Int64[Tensor, " j"]
    gap: Float[Tensor, " j"]
    margin: Float[Tensor, " j"]
    passes: Int64[Tensor, " j"]


@dataclass
class Redone:
    """Labels that a fast precision left open: how many each later step decided, the largest change of a margin between
    two steps, and how many changes were up to 10%, 20%, … of what τ allows."""

    steps: dict[str, int] = field(default_factory=dict)
    largest_change: float = 0.0
    shares: list[int] = field(default_factory=lambda: [0] * SHARES)

    def add(self, other: Redone) -> None:
        shares = [a + b for a, b in zip(self.shares, other.shares, strict=True)]
        steps = {step: self.steps.get(step, 0) + other.steps.get(step, 0) for step in {**self.steps, **other.steps}}
        self.steps, self.shares, self.largest_change = steps, shares, max(self.largest_change, other.largest_change)


@dataclass
class Audit:
    """Labels of a fast precision that were decided again, by the image's row in its batch."""

    redone: dict[int, Redone] = field(default_factory=lambda: defaultdict(Redone))
    exceeded: set[int] = field(default_factory=set)
    """Rows with a change beyond what τ allows: it was measured on copies too unlike these."""

    def count(self, rows: list[int], step: str) -> None:
        for row in rows:
            steps = self.redone[row].steps
            steps[step] = steps.get(step, 0) + 1

    def compare(self, rows: Tensor, change: Tensor, allowed: float) -> float | None:
        """Note how far margins changed between two steps; the largest change beyond what is allowed, if any was."""
        known = change.isfinite()  # an overflow or NaN never counts, so it needs no τ
        for row, size in zip(rows[known].tolist(), change[known].tolist(), strict=True):
            redone = self.redone[row]
            redone.largest_change = max(redone.largest_change, size)
            redone.shares[min(SHARES - 1, int(SHARES * size / allowed))] += 1
        above = known & (change > allowed)
        self.exceeded |= set(rows[above].tolist())
        return float(change[above].amax()) if bool(above.any()) else None


def decided(gap: Float[Tensor, "*j"], tau: float) -> Bool[Tensor, "*j"]:
    """Does a label lead by enough? An infinite lead is an overflow, and no lead at all."""
    return (gap >= tau) & gap.isfinite()


class Evaluator(InChunks):
    """`chunk` starts as the engine's batch size and halves when memory runs out; `passes` counts the copies evaluated.

    With `strict`, a change above τ raises, as it must where certificates are issued. Without, as in prediction, where
    images may be hostile, the float32 label is taken and the change counted.
    """

    def __init__(self, classifier: Classifier, engine: Engine, *, strict: bool = True) -> None:
        self.classifier, self.engine, self.strict = classifier, engine, strict
        self.chunk = 0 if engine.batch_size == "auto" else engine.batch_size
        self.audit = Audit()
        self.passes = 0
        self.measured_on: object = None
        self.networks: Callable[..., Network] | None = None
        self.refresh()

    @property
    def measured(self) -> Measured:
        """The engine with its τ; no label counts without one."""
        if not isinstance(self.engine, Measured):
            raise InputError(
                f"no τ has been measured for these {self.engine.fast} labels, so none is sure enough to count; "
                "call check_classifier and use the engine it returns, or pp.certify, which does so"
            )
        return self.engine

    def refresh(self) -> None:
        """Have the classifier's fast form take over its weights, however they were changed."""
        refresh = getattr(self.classifier, "refresh", None)
        if refresh is not None:
            refresh()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, the weights stay as they are, so the classifier is looked at once for all passes."""
        self.networks = cache(partial(network, self.classifier))
        try:
            yield
        finally:
            self.networks = None

    def fixed(self, images: Tensor) -> bool:
        """On a GPU, or compiled, batches have few sizes: for every new one kernels are chosen anew, or compiled."""
        return images.is_cuda or self.engine.compile is True

    def shape(self, count: int) -> int:
        """The size of the next batch of `count` that are left: the largest that they fill by half."""
        sizes = [max(1, self.chunk // part) for part in PARTS]
        return next((size for size in sizes if 2 * count >= size), sizes[-1])

    @torch.no_grad()
    def evaluate(
        self,
        images: Float[Tensor, "b c h w"],
        keep: Bool[Tensor, "n 1 h w"] | None,
        copies: Copies,
        read: Callable[[Tensor, Tensor | slice], Tensor],
        *,
        precision: Precision | None = None,
        largest: int | None = None,
    ) -> Tensor:
        """read(F(x ⊙ m0 ⊙ m1), rows) for every chunk of copies[rows]; the device is not waited for.

        Without `keep`, F(x). `largest` bounds the batches, to see what their size does. For a classifier that drops
        tokens, copies with equally many of them share a chunk.
        """
        precision = precision or self.engine.fast
        self.chunk = self.chunk or default_batch((int(images.shape[2]), int(images.shape[3])), images.device)
        copies, count = copies.to(images.device), len(copies.image)
        networks = self.networks or cache(partial(network, self.classifier))
        # Where there are more copies than images, each image is prepared once.
        masked = cache(lambda compiled: networks(precision=precision, compiled=compiled).of(images))
        order = None
        tokens = getattr(self.classifier, "token_size", None)
        if keep is not None and tokens is not None:
            corners = keep[:, 0, :: tokens[0], :: tokens[1]].flatten(1)
            order = (corners[copies.first] & corners[copies.second]).sum(dim=1).argsort(stable=True)
            copies = copies.chosen(order)

        def batch(start: int) -> tuple[int, Tensor | slice, Tensor]:
            left = min(count - start, largest or count)
            shape = self.shape(left) if self.fixed(images) else min(self.chunk, left)
            size = min(shape, left)
            part = copies.chosen(slice(start, start + size)).padded(shape)
            visible = None if keep is None else keep[part.first] & keep[part.second]
            compiled = self.engine.compile is True and precision == self.engine.fast and shape == self.chunk
            if count >= len(images):
                logits = masked(compiled)(part.image, visible)[:size]
            else:
                logits = networks(precision=precision, compiled=compiled)(images[part.image], visible)[:size]
            rows = slice(start, start + size) if order is None else order[start : start + size]
            return size, rows, read(logits, rows)

        # One tensor for all: on the CPU, a small one kept from each batch would sit where the next batch was to go.
        answers, start = images.new_zeros(0), 0
        while start < count:
            size, rows, found = self.within_memory(partial(batch, start))
            if not start:
                answers = found.new_empty((count, *found.shape[1:]))
            answers[rows] = found
            start += size
        self.passes += count
        return answers

    def answers(
        self,
        images: Float[Tensor, "b c h w"],
        keep: Bool[Tensor, "n 1 h w"] | None,
        copies: Copies,
        about: Int64[Tensor, " b"] | None = None,
        *,
        settle: bool = True,
    ) -> Answers:
        """Label, gap and margin of each copy, on the CPU; fast labels that lead by less than τ decided in float32.

        The margin is that of the label `about` each image, or without one the gap. Without `settle`, only whether that
        label is the copy's is decided: a tie between two others is left as it is.
        """
        passes = torch.ones(len(copies.image), dtype=torch.int64)
        if not len(passes):
            return Answers(passes, passes.float(), passes.float(), passes)
        copies = copies.to(images.device)
        asked = None if about is None else about.to(images.device)[copies.image]
        classes = None if about is None else label_range(about)
        found = self._read(images, keep, copies, self.engine.fast, asked, classes=classes)
        if self.engine.fast != "fp32":
            self._decide_again(images, keep, copies, asked, found, passes, lead=1 if settle else 2)
        return Answers(found[0].long(), found[1], found[2], passes)

    def _decide_again(
        self,
        images: Tensor,
        keep: Tensor | None,
        copies: Copies,
        asked: Tensor | None,
        found: Tensor,
        passes: Tensor,
        *,
        lead: int,
    ) -> None:
        """Take the labels that lead by less than τ to the next precision, as far as each must go; write what is found
        there over `found`, whose row `lead` says by how much. How far margins were off is noted, and must not exceed
        what τ allows."""
        steps, least = self.measured.steps, self.measured.tau_fp32
        allowed = {precision: max(tau - least, least) if precision != "fp32" else 0.0 for precision, tau in steps}
        left = torch.nonzero(~decided(found[lead].abs(), steps[0][1]))[:, 0]
        before = [(steps[0][0], found[0, left], found[1, left])]
        for precision, tau in steps[1:]:
            if not len(left):
                return
            rows = left.to(images.device)
            some, about = copies.chosen(rows), None if asked is None else asked[rows]
            earlier = [label.long().to(images.device) for _, label, _ in before]
            values = self._read(images, keep, some, precision, about, *earlier)
            found[:, left] = values[:3]
            passes[left] += 1
            done = decided(values[lead].abs(), tau) if precision != "fp32" else torch.ones_like(left, dtype=torch.bool)
            image = some.image.cpu()[done]
            self.audit.count(image.tolist(), precision)
            for (step, _, gap), margin in zip(before, values[3:], strict=True):
                limit = allowed[step] + allowed[precision]
                above = self.audit.compare(image, (gap - margin)[done].abs(), limit)
                if above is not None and self.strict:
                    raise TauExceededError(
                        f"the margin of a label changed by {above:.3g} between {step} and {precision}, more than the "
                        f"{limit:.3g} that the measured τ allows; use a higher precision (fp32 is always sound) and "
                        "begin again"
                    )
            before = [(step, label[~done], gap[~done]) for step, label, gap in before]
            before.append((precision, values[0, ~done], values[1, ~done]))
            left = left[~done]

    def _read(
        self,
        images: Tensor,
        keep: Tensor | None,
        copies: Copies,
        precision: Precision,
        *asked: Int64[Tensor, " j"] | None,
        classes: tuple[int, int] | None = None,
    ) -> Float[Tensor, "values j"]:
        """Label, gap, and the margin of each label `asked` about (the gap where None), on the CPU."""

        def read(logits: Tensor, rows: Tensor | slice) -> Tensor:
            require_classes(classes, int(logits.shape[1]))
            label, gap = top_two(logits)
            margins = [gap if labels is None else label_margin(logits, labels[rows]) for labels in asked]
            return torch.stack([label.float(), gap, *margins], dim=1)  # labels below 2²⁴ are exact

        return self.evaluate(images, keep, copies, read, precision=precision).T.cpu()

    def labels(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """F(x), no mask at all: the undefended answer."""
        self.refresh()
        return self.answers(images, None, Copies.unmasked(len(images))).label.to(images.device)

    def logits(
        self, images: Float[Tensor, "b c h w"], views: Views, view: Int64[Tensor, " v"]
    ) -> Float[Tensor, "b v classes"]:
        """F of every image in each of these views."""
        image, chosen = torch.cartesian_prod(torch.arange(len(images), device=view.device), view).unbind(dim=1)
        copies = Copies(image, views.first[chosen], views.second[chosen])
        return self.evaluate(images, views.keep, copies, lambda logits, _: logits).unflatten(
            0, (len(images), len(view))
        )

    def gradient(
        self,
        images: Float[Tensor, "j c h w"],
        labels: Int64[Tensor, " j"],
        views: Views,
        aim: Aim,
        loss: Callable[[Tensor, Tensor, Aim], Tensor],
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, "j c h w"]]:
        """The loss of each candidate and its gradient in the pixels, a chunk's worth of candidates at a time.

        `loss(logits "j k classes", labels "j", aim)` gives a value for each candidate from its own copies alone; unused
        copies have logits 0. A candidate without copies can change nothing: its loss is −∞.
        """
        value, gradient = images.new_full((len(images),), -torch.inf), torch.zeros_like(images)
        rows = torch.nonzero(aim.used.any(dim=1))[:, 0]
        self.chunk = self.chunk or default_batch((int(images.shape[2]), int(images.shape[3])), images.device)
        networks = cache(partial(network, self.classifier, precision=self.engine.fast, gradients=True))

        def every_group() -> None:
            passes = _Gradients(self, views, networks, size=max(1, self.chunk // GRADIENT_SHARE))
            for part in rows.split_with_sizes(_group_sizes(aim.passes[rows].tolist(), passes.size)):
                value[part], gradient[part] = passes.gradient(images[part], labels[part], aim[part], loss)

        with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # the same patch on every run
            self.within_memory(every_group)
        return value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), gradient


@dataclass
class _Gradients:
    """Passes of at most `size` copies that keep their activations."""

    evaluator: Evaluator
    views: Views
    networks: Callable[..., Network]
    size: int

    def gradient(self, images: Tensor, labels: Tensor, aim: Aim, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Copies that fill one chunk are passed once. A candidate with more of them has a loss that compares copies of
        different chunks: all its logits come first, then the loss and its slope in them, then each chunk again to carry
        that slope back to the pixels."""
        image, slot = torch.nonzero(aim.used, as_tuple=True)
        gradient = torch.zeros_like(images)
        chunks = list(zip(image.split(self.size), slot.split(self.size), strict=True))
        kept = self.tied(images, image, aim.view[image, slot]) if len(chunks) == 1 else None
        if kept is not None:
            logits = kept[1].detach()
        else:
            with torch.no_grad():
                logits = torch.cat([self.passed(images[i], aim.view[i, s]) for i, s in chunks])
        value, slope = _slope(logits, (image, slot), labels, aim, loss)
        for i, s in chunks:
            copies, answers = kept or self.tied(images, i, aim.view[i, s])
            with tf32(self.evaluator.engine.fast != "fp32"):
                carried = _carry(answers, copies, slope[i, s])
            # The copies of an image are adjacent: a product with 0 and 1 adds them in one fixed order.
            rows = torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device)
            sums = (rows[:, None] == i).to(carried) @ carried.flatten(1)
            gradient[rows] += sums.unflatten(1, carried.shape[1:])
        return value, gradient

    def tied(self, images: Tensor, image: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Masked copies, and logits through which a slope can be carried back to them."""
        with torch.enable_grad():
            copies = images[image].requires_grad_()
            return copies, self.passed(copies, view)

    def passed(self, copies: Tensor, view: Tensor) -> Tensor:
        engine, count = self.evaluator.engine, len(copies)
        keep = self.views.shown(view)
        if self.evaluator.fixed(copies):
            sizes = [max(1, self.size // part) for part in GRADIENT_PARTS]
            missing = next(size for size in sizes if count <= size) - count
            again = torch.full((missing,), count - 1, device=copies.device)
            copies, keep = torch.cat([copies, copies[again].detach()]), torch.cat([keep, keep[again]])
        compiled = engine.compile is True and copies.requires_grad and len(copies) == self.size
        return self.networks(compiled=compiled)(copies, keep)[:count]


def _group_sizes(passes: Sequence[int], size: int) -> list[int]:
    """How many consecutive candidates share a pass: their copies fill at most `size` places, or it is one alone."""
    groups: list[int] = []
    held = size
    for count in passes:
        if not groups or held + count > size:
            groups.append(0)
            held = 0
        groups[-1] += 1
        held += count
    return groups


def _slope(
    logits: Float[Tensor, "c classes"],
    place: tuple[Tensor, Tensor],
    labels: Tensor,
    aim: Aim,
    loss: Callable[..., Tensor],
) -> tuple[Float[Tensor, " j"], Float[Tensor, "j k classes"]]:
    """The loss and its slope in the logits."""
    with torch.enable_grad():
        table = logits.new_zeros(*aim.used.shape, logits.shape[1])
        table[place] = logits
        table.requires_grad_()
        value = loss(table, labels, aim)
        (slope,) = torch.autograd.grad(value.sum(), table)
    return value.detach(), slope


def _carry(logits: Tensor, copies: Tensor, slope: Tensor) -> Tensor:
    """The slope in the logits, carried back to the pixels of each copy.

    It is scaled to be near 1 on the way: where a network is sure, the slope of its cross-entropy is too small for fp16.
    Powers of two cost no digit. A pixel whose slope overflows on the way gets none.
    """
    exponent = slope.abs().amax(dim=1, keepdim=True).frexp().exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    size = torch.ldexp(torch.ones_like(slope[:, :1]), exponent)
    carried = None
    if logits.requires_grad:
        (carried,) = torch.autograd.grad(logits, copies, slope / size, allow_unused=True)
    if carried is None:
        raise InputError(
            "the classifier passes no gradient to its input, so a gradient attack cannot use it; "
            "leave out torch.no_grad and detach, or write an attack that needs no gradient"
        )
    return (carried * size[:, :, None, None]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
