"""Masked copies with gradients: what an attacker sees of a defence that looks at an image through masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet
from patchproof.masking import Engine, InChunks, Pass, fill_colour, occlude, padded, passing, tf32
from patchproof.types import Classifier, InputError, Size

GRADIENT_SHARE = 4
"""A pass that keeps its activations for the gradient holds so many times fewer copies than one that does not."""


@dataclass(frozen=True)
class Views:
    """View u of an image hides the masks `first[u]` and `second[u]`; the last view, `whole`, hides nothing.

    The others are the distinct unions of two masks, and `of_pair[a, b]` is the one of masks a and b.
    """

    keep: Bool[Tensor, "m 1 h w"]
    first: Int64[Tensor, " u"]
    second: Int64[Tensor, " u"]
    of_pair: Int64[Tensor, "n n"]

    @classmethod
    def of(cls, masks: MaskSet | None, image_size: Size, device: torch.device) -> Views:
        """Every view of a mask set; without one, the whole image alone."""
        whole = torch.ones(1, 1, *image_size, dtype=torch.bool, device=device)
        if masks is None:
            none = torch.zeros(1, dtype=torch.int64, device=device)
            return cls(whole, none, none, torch.zeros(0, 0, dtype=torch.int64, device=device))
        unions, last = masks.unions, torch.tensor([len(masks)])
        return cls(
            torch.cat([masks.keep(device), whole]),
            torch.cat([unions.first, last]).to(device),
            torch.cat([unions.second, last]).to(device),
            unions.of_pair.to(device),
        )

    @property
    def whole(self) -> int:
        return len(self.first) - 1

    @property
    def one_mask(self) -> Int64[Tensor, " n"]:
        """The views of the first round."""
        return self.of_pair.diagonal()

    def shown(self, view: Int64[Tensor, " v"]) -> Bool[Tensor, "v 1 h w"]:
        """True where a view shows the image."""
        return self.keep[self.first[view]] & self.keep[self.second[view]]


@dataclass(frozen=True)
class Aim:
    """What a candidate's loss reads: its copies in the views `view[j]`, those that are `used`, and a wrong label."""

    view: Int64[Tensor, "j k"]
    used: Bool[Tensor, "j k"]
    wrong: Int64[Tensor, " j"]

    def __getitem__(self, rows: Tensor) -> Aim:
        return Aim(self.view[rows], self.used[rows], self.wrong[rows])

    @property
    def passes(self) -> Int64[Tensor, " j"]:
        return self.used.sum(dim=1)


Loss = Callable[[Tensor, Tensor, Aim], Tensor]
"""(logits "j k classes", labels "j", aim) -> "j"; larger is worse for the defender. Unused copies have logits 0, and a
candidate's loss depends on its own copies alone."""


LARGEST = 100
"""Slopes are scaled by at most two to this power, which float32 holds."""

PARTS = (4, 2, 1)
"""On a GPU, passes with gradients are filled up to these parts of one: for a new number of copies kernels are chosen
anew."""


@dataclass
class Lens(InChunks):
    """A classifier seen through views, a chunk of (image × view) at a time; `chunk` starts as the engine's and halves
    when memory runs out. Good until the classifier changes."""

    classifier: Classifier
    views: Views
    engine: Engine
    whole_parts: bool = False
    """Fill passes up to few sizes, as a GPU likes it."""
    chunk: int = field(init=False)
    network: Callable[..., Pass] = field(init=False, repr=False)
    """`passing`, with its answers remembered."""

    def __post_init__(self) -> None:
        self.chunk = self.engine.chunk
        self.network = cache(partial(passing, self.classifier, precision=self.engine.precision, gradients=True))

    def logits(self, images: Float[Tensor, "b c h w"], view: Int64[Tensor, " v"]) -> Float[Tensor, "b v classes"]:
        """F of every image in each of these views."""
        pairs = torch.cartesian_prod(torch.arange(len(images), device=view.device), view)

        def every_chunk() -> Tensor:
            return self._untied(images, [(part[:, 0], part[:, 1]) for part in pairs.split(self.chunk)])

        return self.within_memory(every_chunk).unflatten(0, (len(images), len(view)))

    def gradient(
        self, images: Float[Tensor, "j c h w"], labels: Int64[Tensor, " j"], aim: Aim, loss: Loss
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, "j c h w"]]:
        """The loss of each image and its gradient there, a chunk's worth of candidates at a time.

        A candidate without copies can change nothing: its loss is −∞.
        """
        value, gradient = images.new_full((len(images),), -torch.inf), torch.zeros_like(images)
        rows = torch.nonzero(aim.used.any(dim=1))[:, 0]

        def every_group() -> None:
            for part in rows.split_with_sizes(_group_sizes(aim.passes[rows].tolist(), self.size)):
                value[part], gradient[part] = self._gradient(images[part], labels[part], aim[part], loss)

        with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # the same patch on every run
            self.within_memory(every_group)
        return value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), gradient

    @property
    def size(self) -> int:
        """Copies in one pass that keeps its activations."""
        return max(1, self.chunk // GRADIENT_SHARE)

    def _gradient(self, images: Tensor, labels: Tensor, aim: Aim, loss: Loss) -> tuple[Tensor, Tensor]:
        """Copies that fill one chunk are passed once. A candidate with more of them has a loss that compares copies of
        different chunks: all its logits come first, then the loss and its slope in them, then each chunk again to carry
        that slope back to the pixels."""
        image, slot = torch.nonzero(aim.used, as_tuple=True)
        gradient = torch.zeros_like(images)
        chunks = list(zip(image.split(self.size), slot.split(self.size), strict=True))
        kept = self._tied(images, image, aim.view[image, slot]) if len(chunks) == 1 else None
        logits = kept[1].detach() if kept else self._untied(images, [(i, aim.view[i, s]) for i, s in chunks])
        value, slope = _slope(logits, (image, slot), labels, aim, loss)
        for i, s in chunks:
            copies, answers = kept or self._tied(images, i, aim.view[i, s])
            with tf32(self.engine.precision != "fp32"):
                carried = _carry(answers, copies, slope[i, s])
            # The copies of an image lie side by side: a product with 0 and 1 adds them in one fixed order.
            rows = torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device)
            sums = (rows[:, None] == i).to(carried) @ carried.flatten(1)
            gradient[rows] += sums.unflatten(1, carried.shape[1:])
        return value, gradient

    def _tied(self, images: Tensor, image: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Masked copies, and logits through which a slope can be carried back to them."""
        with torch.enable_grad():
            copies = images[image].requires_grad_()
            return copies, self._pass(copies, view)

    @torch.no_grad()
    def _untied(self, images: Tensor, chunks: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.cat([self._pass(images[image], view) for image, view in chunks])

    def _pass(self, copies: Tensor, view: Tensor) -> Tensor:
        masked = occlude(copies, self.views.shown(view), fill_colour(self.classifier, copies))
        filled = self._filled(masked)
        compiled = self.engine.compile and copies.requires_grad and len(filled) == self.size
        return self.network(compiled=compiled)(filled)[: len(masked)]

    def _filled(self, masked: Tensor) -> Tensor:
        if not self.whole_parts or not len(masked):
            return masked
        sizes = [max(1, self.size // part) for part in PARTS]
        return padded(masked, next((size for size in sizes if len(masked) <= size), self.chunk))


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
    logits: Float[Tensor, "c classes"], place: tuple[Tensor, Tensor], labels: Tensor, aim: Aim, loss: Loss
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

    It travels as a number near 1, whatever its size: where a network is sure, the slope of its cross-entropy is too
    small for fp16. Powers of two cost no digit. A pixel whose slope overflows on the way keeps still.
    """
    exponent = slope.abs().amax(dim=1, keepdim=True).frexp().exponent.clamp(-LARGEST, LARGEST)
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
