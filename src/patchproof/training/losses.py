"""What a training step minimises besides the cross-entropy of masked copies: margins of certificates on whole images.

A loss is a callable (classifier, images, labels, progress) -> mean over the images. `progress` is the share of the
steps that are done. What it draws from torch's random state follows from the seed and the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchproof.geometry import PatchThreat, Windows, receptive_windows
from patchproof.masking import evaluating
from patchproof.models import ImageClassifier, margin_bounds, passable_layers
from patchproof.types import InputError

Loss = Callable[[ImageClassifier, Tensor, Tensor, float], Tensor]


def step_scores(logits: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """1 where a logit is positive, else 0, with the gradient of a sigmoid (BagCert's local scores).

    The step is blind to the scale of the logits, so the sigmoid is as wide as they are spread: else most cells of a
    network with large logits would get no gradient.
    """
    soft = (logits / logits.detach().abs().mean().clamp(min=torch.finfo(logits.dtype).eps)).sigmoid()
    return (logits > 0).to(soft) + (soft - soft.detach())


@dataclass(frozen=True)
class BagCertHinge:
    """A smooth max(0, target − m_c) over the classes c ≠ y: log(1 + Σ_c exp(s·(target − m_c))) / s.

    m_c = min over p of Σ_{∉A(p)}(e_y − e_c) − |A(p)|, as a share of the cells, is the margin of `bagcert`'s certificate
    against c (Metzen & Yatsura 2021). With the sharpness s → ∞ it is the hinge on the worst class alone, from which a
    network learns far more slowly: one class of each image then gets a gradient (docs/decisions/0011-evidence.md).
    """

    windows: Windows
    """A(p) for the cells of the classifier."""
    target: float = 0.45
    sharpness: float = 10.0

    @classmethod
    def of(cls, classifier: ImageClassifier, threat: PatchThreat, **options: float) -> BagCertHinge:
        """With the windows made beforehand: compiled, the loss would make them in every step."""
        blank = classifier.mean.new_zeros(1, len(classifier.shift), *classifier.input_size)
        with torch.no_grad(), evaluating(classifier):
            rows, columns = classifier.local_logits(blank).shape[2:]
        field = classifier.receptive_field
        return cls(receptive_windows(threat, (rows, columns), field, blank.device), **options)

    def __call__(
        self,
        classifier: ImageClassifier,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        progress: float,
    ) -> Float[Tensor, ""]:
        scores = step_scores(classifier.local_logits(images).float())
        with torch.autocast(images.device.type, enabled=False):  # sums of steps are exact in float32
            missing = self.target - self.margins(scores, labels)
            none = missing.new_zeros(len(missing), 1)
            return (self.sharpness * torch.cat([none, missing], dim=1)).logsumexp(dim=1).mean() / self.sharpness

    def margins(
        self, scores: Float[Tensor, "b classes rows columns"], labels: Int64[Tensor, " b"]
    ) -> Float[Tensor, "b classes"]:
        """m_c / number of cells; ∞ for the label."""
        windows = self.windows.to(scores.device)
        every, cells = torch.arange(len(scores), device=scores.device), scores.flatten(2)
        lead = cells[every, labels][:, None] - cells
        margins = (windows.outside(lead) - windows.sizes).amin(dim=2) / cells.shape[2]
        return margins.scatter(1, labels[:, None], torch.inf)


@dataclass(frozen=True)
class IntervalLoss:
    """Cross-entropy of the worst logits that interval bounds allow a patch at any of `positions` random places of each
    image (Chiang et al. 2020).

    Warm-up from plain training: until `plain` of the steps are done the images are as they are; then the interval
    inside the patch and the share of the bounds in the loss grow linearly, to [0, 1] and 1 when `warm` are done.
    """

    threat: PatchThreat
    positions: int = 4
    plain: float = 0.1
    warm: float = 0.6

    def __call__(
        self,
        classifier: ImageClassifier,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        progress: float,
    ) -> Float[Tensor, ""]:
        grown = min(1.0, max(0.0, (progress - self.plain) / (self.warm - self.plain)))
        clean = functional.cross_entropy(classifier(images).float(), labels) if grown < 1 else images.new_zeros(())
        if not grown:
            return clean
        patches = self.places(images)
        lower = torch.where(patches, (1 - grown) * images, images)
        upper = torch.where(patches, images + grown * (1 - images), images)
        bounds = margin_bounds(
            classifier,
            lower.flatten(0, 1),
            upper.flatten(0, 1),
            labels.repeat(self.positions),
            rounding=False,
        )
        worst = bounds.float().unflatten(0, (self.positions, -1)).amin(dim=0)
        return (1 - grown) * clean + grown * functional.cross_entropy(-worst, labels)

    def places(self, images: Float[Tensor, "b c h w"]) -> Bool[Tensor, "positions b 1 h w"]:
        """Patches of a random size of the threat at random places."""
        shape, sizes = (self.positions, len(images)), torch.tensor(self.threat.patch_sizes)
        size = sizes[torch.randint(len(sizes), shape)]

        def inside(axis: int) -> Bool[Tensor, "positions b n"]:
            side = self.threat.image_size[axis]
            first = (torch.rand(shape) * (side - size[..., axis] + 1)).long()
            offset = torch.arange(side) - first[..., None]
            return ((offset >= 0) & (offset < size[..., axis, None])).to(images.device)

        return (inside(0)[..., :, None] & inside(1)[..., None, :])[:, :, None]


def bagcert(classifier: ImageClassifier, threat: PatchThreat) -> Loss:
    if not hasattr(classifier, "local_logits"):
        raise InputError(
            f"loss `bagcert` needs a network with local logits, e.g. bagnet5, not {classifier.architecture}"
        )
    return BagCertHinge.of(classifier, threat)


def interval(classifier: ImageClassifier, threat: PatchThreat) -> Loss:
    list(passable_layers(classifier))
    return IntervalLoss(threat)


LOSSES: Mapping[str, Callable[[ImageClassifier, PatchThreat], Loss | None]] = {
    "cross-entropy": lambda classifier, threat: None,
    "bagcert": bagcert,
    "ibp": interval,
}
"""Losses by name, for a classifier and the patch of the training masks; None: that of the masked copies."""
