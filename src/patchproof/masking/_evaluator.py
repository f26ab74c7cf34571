"""One classifier under one engine: labels, logits and gradients of masked copies, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.masking._arithmetic import Network, network
from patchproof.masking._gradient import groups, pixel_gradients
from patchproof.masking._labels import Audit, Measured, decided, label_margin, label_range, require_classes, top_two
from patchproof.masking._memory import first_batch, out_of_memory
from patchproof.masking._objective import Aim, Views
from patchproof.settings import Engine
from patchproof.types import Classifier, InputError, Precision, TauExceededError

Result = TypeVar("Result")


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
        """Repeat the last copy until there are `size` copies."""
        missing = size - len(self.image)
        return self if missing <= 0 else Copies(*(torch.cat([t, t[-1:].expand(missing)]) for t in self))


class Answers(NamedTuple):
    """Answers for copies: label, its margin (`gap`), margin of the label asked about, and how many passes they took."""

    label: Int64[Tensor, " j"]
    gap: Float[Tensor, " j"]
    margin: Float[Tensor, " j"]
    passes: Int64[Tensor, " j"]


class Evaluator:
    """Evaluates masked copies in chunks, which begin with the engine's batch size and halve when memory runs out.

    `passes` counts the copies evaluated. With `strict`, as wherever certificates are issued, a margin that changes by
    more than τ allows raises TauExceededError. Without it, as in prediction, where images may be hostile, the float32
    label is taken and the change recorded in `audit`.
    """

    def __init__(self, classifier: Classifier, engine: Engine, *, strict: bool = True) -> None:
        self.classifier, self.engine, self.strict = classifier, engine, strict
        self.chunk = 0
        """Masked copies in one pass; 0 before the first."""
        self.audit = Audit()
        self.passes = 0
        self.measured_on: object = None
        self.networks: Callable[..., Network] | None = None
        self.refresh()

    @property
    def measured(self) -> Measured:
        """The engine with its τ; without one no label counts."""
        if not isinstance(self.engine, Measured):
            raise InputError(
                f"no τ has been measured for these {self.engine.fast} labels, so none is sure enough to count; "
                "call check_classifier and use the engine it returns, or pp.certify, which does so"
            )
        return self.engine

    def refresh(self) -> None:
        """Have the classifier's fast form take over its weights, however they were changed."""
        if hasattr(self.classifier, "refresh"):
            self.classifier.refresh()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Promise that the weights stay as they are in this context, so the classifier is inspected only once."""
        self.networks = cache(partial(network, self.classifier))
        try:
            yield
        finally:
            self.networks = None

    def within_memory(self, work: Callable[[], Result]) -> Result:
        """Return work(), tried again with half the chunk as long as memory runs out."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if self.chunk == 1 or not out_of_memory(error):
                    raise
            self.chunk = max(1, self.chunk // 2)  # outside the handler: the error holds on to the failed pass's tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def fixed(self, images: Tensor) -> bool:
        """True if batches must have few sizes: each new size takes time to choose kernels (GPU) or to compile."""
        return images.is_cuda or self.engine.compile is True

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
        """Return read(F(x ⊙ m0 ⊙ m1), rows) of all copies, evaluated in chunks copies[rows]; without `keep`, of F(x).

        `largest` bounds the batch size, to measure what it changes. If the classifier drops tokens, copies with equally
        many visible tokens share a chunk. Nothing here waits for the device.
        """
        precision = precision or self.engine.fast
        self.chunk = self.chunk or first_batch(self.engine.batch_size, images)
        copies = copies.to(images.device)
        count = len(copies.image)
        networks = self.networks or cache(partial(network, self.classifier))
        prepare = count >= len(images)  # with fewer copies than images, most of them would be prepared in vain
        forward = cache(lambda compiled: networks(precision=precision, compiled=compiled).of(images, prepare=prepare))
        order = None
        tokens = getattr(self.classifier, "token_size", None)
        if keep is not None and tokens is not None:
            corners = keep[:, 0, :: tokens[0], :: tokens[1]].flatten(1)
            order = (corners[copies.first] & corners[copies.second]).sum(dim=1).argsort(stable=True)
            copies = copies.chosen(order)

        def batch(start: int) -> tuple[int, Tensor | slice, Tensor]:
            left = min(count - start, largest or count)
            shape = min(self.chunk, left)
            if self.fixed(images):  # a whole chunk, a quarter or an eighth: the largest that is filled by half
                sizes = [max(1, self.chunk // part) for part in (1, 4, 8)]
                shape = next((size for size in sizes if 2 * left >= size), sizes[-1])
            stop = start + min(shape, left)
            part = copies.chosen(slice(start, stop)).padded(shape)
            visible = None if keep is None else keep[part.first] & keep[part.second]
            compiled = self.engine.compile is True and precision == self.engine.fast and shape == self.chunk
            logits = forward(compiled)(part.image, visible)[: stop - start]
            rows = slice(start, stop) if order is None else order[start:stop]
            return stop, rows, read(logits, rows)

        # One tensor for all: on the CPU, a small one kept from each batch would sit where the next batch was to go.
        answers, start = images.new_zeros(0), 0
        while start < count:
            stop, rows, found = self.within_memory(partial(batch, start))
            if start == 0:
                answers = found.new_empty((count, *found.shape[1:]))
            answers[rows] = found
            start = stop
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
        """Return the answers for all copies, on the CPU; fast labels with a margin below τ are decided again.

        `about` names a label for each image, whose margin is wanted; the default is the copy's own label. Without
        `settle`, only whether a copy answers that label is decided: a tie between two other labels stays open.
        """
        count = len(copies.image)
        found, passes = torch.zeros(3, count), torch.zeros(count, dtype=torch.int64)
        if not count:
            return Answers(passes, found[1], found[2], passes)
        copies = copies.to(images.device)
        wanted = None if about is None else about.to(images.device)[copies.image]
        classes = None if about is None else label_range(about)

        def read(asked: Sequence[Tensor | None], logits: Tensor, rows: Tensor | slice) -> Tensor:
            require_classes(classes, int(logits.shape[1]))
            label, gap = top_two(logits)
            margins = [gap if labels is None else label_margin(logits, labels[rows]) for labels in asked]
            return torch.stack([label.float(), gap, *margins], dim=1)  # labels below 2²⁴ are exact

        steps: list[tuple[Precision, float]] = [("fp32", 0.0)] if self.engine.fast == "fp32" else self.measured.steps
        left = torch.arange(count)
        earlier: list[tuple[Precision, Tensor, Tensor]] = []  # precision, labels and margins of the copies left
        for precision, tau in steps:
            asked = [wanted, *(label.long().to(images.device) for _, label, _ in earlier)]
            values = self.evaluate(images, keep, copies, partial(read, asked), precision=precision).T.cpu()
            found[:, left] = values[:3]
            passes[left] += 1
            done = decided(values[1 if settle else 2].abs(), tau)
            if precision == "fp32":
                done = torch.ones_like(done)
            if earlier:
                changes = {s: (gap - now)[done].abs() for (s, _, gap), now in zip(earlier, values[3:], strict=True)}
                self._check_changes(copies.image.cpu()[done], precision, changes)
            if bool(done.all()):
                break
            earlier = [(step, label[~done], gap[~done]) for step, label, gap in [*earlier, (precision, *values[:2])]]
            left = left[~done]
            rows = torch.nonzero(~done)[:, 0].to(images.device)
            copies, wanted = copies.chosen(rows), None if wanted is None else wanted[rows]
        return Answers(found[0].long(), found[1], found[2], passes)

    def _check_changes(self, image: Tensor, precision: Precision, changes: dict[Precision, Tensor]) -> None:
        """Audit labels just decided in `precision`: how much their margins changed since each earlier step."""
        least = self.measured.tau_fp32
        allowed = {step: max(tau - least, least) for step, tau in self.measured.steps} | {"fp32": 0.0}
        for row in image.tolist():
            self.audit.redone[row].steps[precision] += 1
        for step, change in changes.items():
            limit = allowed[step] + allowed[precision]
            above = self.audit.compare(image, change, limit)
            if above is not None and self.strict:
                raise TauExceededError(
                    f"the margin of a label changed by {above:.3g} between {step} and {precision}, more than the "
                    f"{limit:.3g} that the measured τ allows; use a higher precision (fp32 is always sound) and "
                    "begin again"
                )

    def labels(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Return F(x) without any mask: the undefended answer."""
        self.refresh()
        return self.answers(images, None, Copies.unmasked(len(images))).label.to(images.device)

    def logits(
        self, images: Float[Tensor, "b c h w"], views: Views, view: Int64[Tensor, " v"]
    ) -> Float[Tensor, "b v classes"]:
        """Return the logits of every image in each of these views."""
        image, chosen = torch.cartesian_prod(torch.arange(len(images), device=view.device), view).unbind(dim=1)
        copies = Copies(image, views.first[chosen], views.second[chosen])
        logits = self.evaluate(images, views.keep, copies, lambda logits, _: logits)
        return logits.unflatten(0, (len(images), len(view)))

    def gradient(
        self,
        images: Float[Tensor, "j c h w"],
        labels: Int64[Tensor, " j"],
        views: Views,
        aim: Aim,
        loss: Callable[[Tensor, Tensor, Aim], Tensor],
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, "j c h w"]]:
        """Return the loss of each candidate and its gradient in the pixels.

        `loss(logits "j k classes", labels "j", aim)` gives a value for each candidate from its own copies alone; unused
        copies have logits 0. A candidate without copies cannot change anything: its loss is −∞.
        """
        value, gradient = images.new_full((len(images),), -torch.inf), torch.zeros_like(images)
        candidates = torch.nonzero(aim.used.any(dim=1))[:, 0]
        self.chunk = self.chunk or first_batch(self.engine.batch_size, images)
        networks = cache(partial(network, self.classifier, precision=self.engine.fast, gradients=True))
        exact, compiled = self.engine.fast == "fp32", self.engine.compile is True

        def every_group() -> None:
            size = max(1, self.chunk // 4)  # activations are kept for the gradient

            def forward(copies: Tensor, view: Tensor) -> Tensor:
                count, keep = len(copies), views.shown(view)
                if self.fixed(images):  # a quarter, a half or the whole of the largest size
                    shape = next(shape for part in (4, 2, 1) if (shape := max(1, size // part)) >= count)
                    again = torch.full((shape - count,), count - 1, device=copies.device)
                    copies, keep = torch.cat([copies, copies[again].detach()]), torch.cat([keep, keep[again]])
                whole = compiled and copies.requires_grad and len(copies) == size
                return networks(compiled=whole)(copies, keep)[:count]

            for rows in candidates.split_with_sizes(groups(aim.passes[candidates].tolist(), size)):
                some = images[rows], labels[rows], aim[rows]
                value[rows], gradient[rows] = pixel_gradients(forward, *some, loss, size=size, exact=exact)

        with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # the same patch on every run
            self.within_memory(every_group)
        return value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), gradient
