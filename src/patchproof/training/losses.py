"""Losses of a training step: the cross-entropy of masked copies, or margins of certificates on whole images.

A loss on whole images is a callable (classifier, images, labels, progress) -> mean over the images, where `progress` is
the share of the steps that are done. Its random numbers follow from the seed and the number of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import PatchThreat, Windows, receptive_windows
from patchproof.masking import MaskedForward, evaluating
from patchproof.models import ImageClassifier, adopt, margin_bounds, passable_layers
from patchproof.settings import Checked
from patchproof.types import InputError, kind_of, require_kinds

Images = Float[Tensor, "b c h w"]
Labels = Int64[Tensor, " b"]
Loss = Callable[[ImageClassifier, Tensor, Tensor, float], Tensor]
"""(classifier, images, labels, progress) -> mean over the images. The classifier is in train mode and takes images in
[0, 1]; the network that was passed to `pp.train` is its `module`. A method `describe()` that returns JSON adds the
loss's settings to what must be equal to resume."""
Teacher = Callable[[Tensor, Tensor | None], Tensor]
"""(images, keep) -> logits to learn from."""


class StepLoss(nn.Module):
    """The loss of part of a batch as a module, as DistributedDataParallel and mixed precision require."""

    def __init__(
        self,
        classifier: ImageClassifier,
        masked: MaskedForward,
        loss: Loss | None = None,
        teacher: Teacher | None = None,
        *,
        teacher_weight: float = 0.5,
        smoothing: float = 0.0,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.classifier, self.masked, self.loss, self.teacher = classifier, masked, loss, teacher
        self.options = {"smoothing": smoothing, "teacher_weight": teacher_weight}
        self.of_whole_batch: Any = torch.compile(cast(Any, loss).__call__, dynamic=False) if compiled else loss
        self.largest = 0

    def forward(
        self, images: Tensor, labels: Tensor, keep: Tensor, progress: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "copies b"]]:
        """Return the mean loss, and the loss of each copy, which for a loss on whole images is the mean."""
        if self.loss is None:
            return masked_loss(self.masked, images, labels, keep, teacher=self.teacher, **self.options)
        self.largest = max(self.largest, len(images))
        loss: Any = self.of_whole_batch if len(images) == self.largest else self.loss
        # Compilation would take a number for a constant and begin anew in every step.
        done: Any = progress if loss is self.loss else torch.full((), progress, device=images.device)
        mean = loss(self.classifier, images, labels, done)
        if not (isinstance(mean, Tensor) and mean.ndim == 0 and mean.requires_grad):
            raise InputError(
                "loss must return the mean over the images, a tensor of shape () with a gradient, e.g. "
                f"functional.cross_entropy(classifier(images), labels), not {kind_of(mean)}"
            )
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
    """Return the mean cross-entropy over the masked copies (not the clean image), and that of each copy.

    With a teacher T the mean is (1 − w)·CE + w·KL(T(x ⊙ m) ‖ F(x ⊙ m)), where T sees the same masked copies.
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


def step_scores(logits: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """BagCert's local scores: 1 where a logit is positive, else 0, with the gradient of a sigmoid.

    The sigmoid is scaled by the mean |logit|, because otherwise most cells of a network with large logits would get no
    gradient; the step itself does not depend on the scale.
    """
    soft = (logits / logits.detach().abs().mean().clamp(min=torch.finfo(logits.dtype).eps)).sigmoid()
    return (logits > 0).to(soft) + (soft - soft.detach())


@dataclass(frozen=True)
class Described(Checked):
    """Base class of losses whose settings must be equal for a training to be resumed."""

    def describe(self) -> dict[str, Any]:
        """Every field; the windows of a threat by what their cells and locations are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(windows := values.get("windows"), Windows):
            touched = hashlib.sha256(windows.touched.cpu().numpy().tobytes()).hexdigest()
            values["windows"] = {"touched": touched, "places": len(windows.places)}
        return {name: asdict(value) if isinstance(value, PatchThreat) else value for name, value in values.items()}


@dataclass(frozen=True)
class BagCertLoss(Described):
    """BagCert's loss: a smooth max(0, target − m_c) over the classes c ≠ y, log(1 + Σ_c exp(s·(target − m_c))) / s.

    m_c = min over p of Σ_{∉A(p)}(e_y − e_c) − |A(p)|, as a share of the cells, is the margin of `bagcert`'s certificate
    against c (Metzen & Yatsura 2021). With the sharpness s → ∞ it becomes the hinge on the worst class, from which a
    network learns far more slowly, because only one class per image gets a gradient (docs/decisions/0011-evidence.md).

    A hinge grows with every missing vote, so images that cannot be certified have the largest share of it. Late in the
    training a ramp that levels off, 4w·sigmoid(1 − m/w) with the smooth minimum m of m_c, counts for `ramp`, so that
    the network attends to images near their certificate.
    """

    windows: Windows
    """The cells A(p) that each patch p touches."""
    target: float = 0.45
    sharpness: float = 10.0
    ramp: float = 0.8
    """Weight of the ramp at the end."""
    width: float = 0.1
    """Width w of the ramp."""
    begin: float = 0.4
    """Share of the steps after which the ramp's weight begins to grow."""
    full: float = 0.7
    """Share of the steps after which its weight is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin < self.full:
            raise InputError(
                f"begin must be less than full, where the ramp is complete, not {self.begin} of {self.full}"
            )
        if not (self.sharpness > 0 and self.width > 0 and 0 <= self.ramp <= 1):
            found = f"{self.sharpness}, {self.width} and {self.ramp}"
            raise InputError(f"sharpness and width must be above 0 and ramp from 0 to 1, not {found}")

    @classmethod
    def of(cls, classifier: nn.Module, threat: PatchThreat, **options: float) -> BagCertLoss:
        """Build the loss with its windows, which a compiled loss would otherwise compute in every step.

        A module that is no ImageClassifier is asked about RGB images of the threat's size.
        """
        require_kinds(cls.of, {"threat": threat})
        network = adopt(classifier, input_size=threat.image_size, num_classes=1)  # its classes are not asked for
        if not (hasattr(network, "local_logits") and hasattr(network, "receptive_field")):
            raise InputError(
                "loss `bagcert` needs a network with `local_logits` and `receptive_field`, e.g. bagnet5, not "
                f"{network.architecture}"
            )
        device = next(classifier.parameters()).device
        blank = torch.zeros(1, len(network.shift), *network.input_size, device=device)
        with torch.no_grad(), evaluating(network):
            rows, columns = network.local_logits(blank).shape[2:]
        return cls(receptive_windows(threat, (rows, columns), network.receptive_field, device), **options)

    def __call__(
        self, classifier: ImageClassifier, images: Images, labels: Labels, progress: float | Tensor
    ) -> Float[Tensor, ""]:
        scores = step_scores(classifier.local_logits(images).float())
        with torch.autocast(images.device.type, enabled=False):  # sums of steps are exact in float32
            margins = self.margins(scores, labels)
            missing = functional.pad(self.target - margins, (1, 0))
            hinge = (self.sharpness * missing).logsumexp(dim=1) / self.sharpness
            smallest = -(-3 * self.sharpness * margins).logsumexp(dim=1) / (3 * self.sharpness)
            ramp = 4 * self.width * (1 - smallest / self.width).sigmoid()
            late = (torch.as_tensor(progress, device=images.device) - self.begin) / (self.full - self.begin)
            return hinge.lerp(ramp, self.ramp * late.clamp(0, 1)).mean()

    def margins(
        self, scores: Float[Tensor, "b classes rows columns"], labels: Int64[Tensor, " b"]
    ) -> Float[Tensor, "b classes"]:
        """Return m_c as a share of the cells; ∞ for the label."""
        windows = self.windows.to(scores.device)
        every, cells = torch.arange(len(scores), device=scores.device), scores.flatten(2)
        lead = cells[every, labels][:, None] - cells
        margins = (windows.outside(lead) - windows.sizes).amin(dim=2) / cells.shape[2]
        return margins.scatter(1, labels[:, None], torch.inf)


@dataclass(frozen=True)
class IntervalLoss(Described):
    """IBP's loss: cross-entropy of the worst logits that a patch at one of `positions` random locations can reach.

    The logits are interval bounds (Chiang et al. 2020). Training starts plain, for the share `plain` of the steps. Then
    the interval inside the patch and the weight of the bounds grow linearly, to [0, 1] and 1 at the share `warm`.
    """

    threat: PatchThreat
    positions: int = 20
    plain: float = 0.1
    warm: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions < 1:
            raise InputError(f"positions must be at least 1, not {self.positions}")
        if not self.plain < self.warm:
            raise InputError(
                f"plain must be less than warm, where bounds are complete, not {self.plain} of {self.warm}"
            )

    @classmethod
    def of(cls, classifier: ImageClassifier, threat: PatchThreat) -> IntervalLoss:
        passable_layers(classifier)  # refuses layers without bounds
        return cls(threat)

    def __call__(
        self, classifier: ImageClassifier, images: Images, labels: Labels, progress: float
    ) -> Float[Tensor, ""]:
        grown = min(1.0, max(0.0, (progress - self.plain) / (self.warm - self.plain)))
        clean = functional.cross_entropy(classifier(images).float(), labels) if grown < 1 else images.new_zeros(())
        if not grown:
            return clean
        owner = torch.arange(len(images), device=images.device).repeat(self.positions)
        windows = self.places(self.positions * len(images)).to(images.device)
        bound = partial(margin_bounds, classifier, images, share=grown, rounding=False)
        with torch.no_grad():  # only the windows of the smallest bounds have a gradient
            bounds = bound(labels[owner], owner, windows).unflatten(0, (self.positions, -1))
        smallest = bounds.argmin(dim=0) * len(images) + owner[: len(images), None]
        some, place = smallest.unique(return_inverse=True)
        worst = bound(labels[owner[some]], owner[some], windows[some]).float().gather(0, place)
        return (1 - grown) * clean + grown * functional.cross_entropy(-worst, labels)

    def places(self, count: int) -> Int64[Tensor, "count 4"]:
        """Draw patches of random sizes of the threat at random locations."""
        sizes = torch.tensor(self.threat.patch_sizes)
        size = sizes[torch.randint(len(sizes), (count,))]
        room = torch.tensor(self.threat.image_size) - size + 1
        first = (torch.rand(count, 2) * room).long()
        return torch.cat([first, size], dim=1)


LOSSES: Mapping[str, Callable[[ImageClassifier, PatchThreat], Loss | None]] = {
    "cross-entropy": lambda classifier, threat: None,
    "bagcert": BagCertLoss.of,
    "ibp": IntervalLoss.of,
}
"""Constructors of losses by name, for a classifier and the patch of the training masks; None: that of masked copies."""
