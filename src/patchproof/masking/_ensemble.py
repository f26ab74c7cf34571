"""Several classifiers combined into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from patchproof.masking._images import show
from patchproof.models import mask_colour
from patchproof.types import Classifier, InputError, Interpolation, Size


class Ensemble(nn.Module):
    """F(x) = log (1/k) Σ softmax(F_i(x)), the logarithm of the mean of the members' probabilities.

    Under a mask, each member hides pixels its own way. Members that have an input size, a number of classes or class
    names must agree in them. Images are resized as for the first member.
    """

    kind = "ensemble of"

    def __init__(self, members: Sequence[Classifier]) -> None:
        super().__init__()
        fit = isinstance(members, Sequence) and all(callable(one) and not isinstance(one, type) for one in members)
        if not fit or not members:
            raise InputError(
                "members must be a list of at least one classifier, e.g. pp.Ensemble([first, second]), not "
                f"{members!r:.40}"
            )
        self.members = list(members)
        self.networks = nn.ModuleList([member for member in members if isinstance(member, nn.Module)])
        self.input_size: Size | None = self._agreed("input_size")
        self.num_classes: int | None = self._agreed("num_classes")
        self.class_names: tuple[str, ...] | None = self._agreed("class_names")
        self.interpolation: Interpolation = next(iter(self._known("interpolation")), "bicubic")
        self.crop_pct: float = next(iter(self._known("crop_pct")), 1.0)
        tokens = set(self._known("token_size"))
        self.token_size: Size | None = tokens.pop() if len(tokens) == 1 else None
        names = [getattr(member, "architecture", type(member).__name__) for member in members]
        self.architecture = f"{self.kind} {', '.join(names)}"
        self.source = ", ".join(dict.fromkeys(self._known("source"))) or "own module"
        fill = mask_colour(members[0])
        if fill is not None:
            self.fill = fill
        self.training = self.networks.training = any(network.training for network in self.networks)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return log-probabilities of images in [0, 1], in float32."""
        return self._log_mean(images, None)

    def masked(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        """Return log-probabilities of masked images, shown to each member its own way."""
        return self._log_mean(images, keep)

    def lowered(self, dtype: torch.dtype, *, compiled: bool = False) -> Ensemble | None:
        """Return the ensemble of the members' lowered forms, or None if one member has none."""
        forms: list[Any] = [lower(dtype, compiled=compiled) for lower in self._known("lowered")]
        if len(forms) < len(self.members) or any(form is None for form in forms):
            return None
        return type(self)(forms).eval()

    def refresh(self) -> None:
        """Refresh every member that can be refreshed."""
        for refresh in self._known("refresh"):
            refresh()

    def _log_mean(self, images: Tensor, keep: Tensor | None) -> Tensor:
        logits = [show(member, images, keep) for member in self.members]
        classes = [each.shape[1] for each in logits]
        if len(set(classes)) > 1:
            raise InputError(f"the members of an ensemble must agree in their classes: they have {classes}")
        log_probabilities = torch.stack([each.float().log_softmax(dim=1) for each in logits])
        return log_probabilities.logsumexp(dim=0) - math.log(len(logits))

    def _known(self, name: str) -> list[Any]:
        """Return the values of an attribute, from the members that have it."""
        values = [getattr(member, name, None) for member in self.members]
        return [value for value in values if value is not None]

    def _agreed(self, name: str) -> Any:
        values = self._known(name)
        for value in values:
            if value != values[0]:
                raise InputError(f"the members of an ensemble must agree in {name}: {values[0]!r:.60}, {value!r:.60}")
        return values[0] if values else None


class Mirror(Ensemble):
    """An ensemble that is shown the mirrored image under the mirrored mask."""

    kind = "mirrored"
    mirrored = True

    def _log_mean(self, images: Tensor, keep: Tensor | None) -> Tensor:
        return super()._log_mean(images.flip(3), None if keep is None else keep.flip(3))


def weight_names(weights: str) -> list[str]:
    """Split `a,b` into the names of two networks, unless it is a path that exists."""
    names = [weights] if Path(weights).expanduser().exists() else [name.strip() for name in weights.split(",")]
    if not all(names):
        raise InputError(f"weights of several networks are separated by one comma each, e.g. a,b, not `{weights}`")
    return names


def assembled(weights: str, load: Callable[[str], Classifier], *, mirror: bool = False) -> Classifier:
    """Return the network that `weights` names, or the ensemble of several; with `mirror`, together with its mirror."""
    members = [load(name) for name in weight_names(weights)]
    found = members[0] if len(members) == 1 else Ensemble(members)
    if not mirror:
        return found
    both = Ensemble([found, Mirror([found])])
    both.architecture = f"{getattr(found, 'architecture', type(found).__name__)} with its mirror image"
    return both
