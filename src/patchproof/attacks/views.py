"""Masked copies with gradients: what an attacker sees of a defence that looks at an image through masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet
from patchproof.masking import AUTOCAST, Engine, fill_colour, occlude, padded
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

    def __getitem__(self, rows: Tensor | slice) -> Aim:
        return Aim(self.view[rows], self.used[rows], self.wrong[rows])

    @property
    def passes(self) -> Int64[Tensor, " j"]:
        return self.used.sum(dim=1)


Loss = Callable[[Tensor, Tensor, Aim], Tensor]
"""(logits "j k classes", labels "j", aim) -> "j"; larger is worse for the defender. Unused copies have logits 0, and a
candidate's loss depends on its own copies alone."""


@dataclass(frozen=True)
class Lens:
    """A classifier seen through views, a chunk of (image × view) at a time."""

    classifier: Classifier
    views: Views
    engine: Engine
    whole_chunks: bool = False
    """Fill every pass up to one of two sizes: on a GPU, kernels are chosen anew for every new number of copies."""

    def logits(self, images: Float[Tensor, "b c h w"], view: Int64[Tensor, " v"]) -> Float[Tensor, "b v classes"]:
        """F of every image in each of these views."""
        pairs = torch.cartesian_prod(torch.arange(len(images), device=view.device), view)
        chunks = [(part[:, 0], part[:, 1]) for part in pairs.split(self.engine.chunk)]
        return self._untied(images, chunks).unflatten(0, (len(images), len(view)))

    def gradient(
        self, images: Float[Tensor, "j c h w"], labels: Int64[Tensor, " j"], aim: Aim, loss: Loss
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, "j c h w"]]:
        """The loss of each image and its gradient there, a chunk's worth of candidates at a time."""
        value, gradient = images.new_zeros(len(images)), torch.zeros_like(images)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # the same patch on every run
            for rows in _groups(aim.passes.tolist(), self.size):
                value[rows], gradient[rows] = self._gradient(images[rows], labels[rows], aim[rows], loss)
        return value, gradient

    @property
    def size(self) -> int:
        """Copies in one pass that keeps its activations."""
        return max(1, self.engine.chunk // GRADIENT_SHARE)

    def _gradient(self, images: Tensor, labels: Tensor, aim: Aim, loss: Loss) -> tuple[Tensor, Tensor]:
        """Copies that fill one chunk are passed once. A candidate with more of them has a loss that compares copies of
        different chunks: all its logits come first, then the loss and its slope in them, then each chunk again to carry
        that slope back to the pixels."""
        image, slot = torch.nonzero(aim.used, as_tuple=True)
        gradient = torch.zeros_like(images)
        if not len(image):
            return images.new_zeros(len(images)), gradient
        chunks = list(zip(image.split(self.size), slot.split(self.size), strict=True))
        kept = self._tied(images, image, aim.view[image, slot]) if len(chunks) == 1 else None
        logits = kept[1].detach() if kept else self._untied(images, [(i, aim.view[i, s]) for i, s in chunks])
        value, slope = _slope(logits, (image, slot), labels, aim, loss)
        for i, s in chunks:
            copies, answers = kept or self._tied(images, i, aim.view[i, s])
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
        with _autocast(self.engine, copies.device):
            return self.classifier(self._filled(masked)).float()[: len(masked)]

    def _filled(self, masked: Tensor) -> Tensor:
        if not self.whole_chunks:
            return masked
        return padded(masked, self.size if len(masked) <= self.size else self.engine.chunk)


def _groups(passes: Sequence[int], size: int) -> Iterator[slice]:
    """Consecutive candidates whose copies fill at most `size` places; one with more of them stands alone."""
    start = held = 0
    for number, count in enumerate(passes):
        if held and held + count > size:
            yield slice(start, number)
            start, held = number, 0
        held += count
    if len(passes):
        yield slice(start, len(passes))


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
    carried = torch.autograd.grad(logits, copies, slope, allow_unused=True)[0] if logits.requires_grad else None
    if carried is None:
        raise InputError(
            "the classifier passes no gradient to its input, so a gradient attack cannot use it; "
            "leave out torch.no_grad and detach, or write an attack that needs no gradient"
        )
    return carried


def _autocast(engine: Engine, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=AUTOCAST.get(engine.precision), enabled=engine.precision in AUTOCAST)
