"""F(x ⊙ m): the only place where a classifier sees a masked image.

Certification, inference and the training search all evaluate masked copies through `evaluate_copies`, in chunks of
(image × mask), so memory depends on the chunk and neither on the batch nor on the number of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from patchproof.geometry import MaskSet
from patchproof.types import CheckError, Classifier, InputError, Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Engine:
    """How masked copies are evaluated: how many at once, how precisely, and from which gap on a label counts.

    A label of a fast pass (any precision but fp32) counts when the top logit leads by at least `tau`; otherwise it is
    decided again in float32. There it must lead by `tau_fp32` to count in a certificate.
    """

    chunk: int = 64
    precision: Precision = "fp32"
    tau: float = 0.0
    tau_fp32: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"a chunk holds at least one masked copy, not {self.chunk}")
        if not (self.tau >= 0 and self.tau_fp32 >= 0):
            raise InputError(f"τ cannot be negative: tau={self.tau}, tau_fp32={self.tau_fp32}")


def as_images(pixels: UInt8[Tensor, "b c h w"], device: torch.device | str) -> Float[Tensor, "b c h w"]:
    """Bytes to [0, 1] floats, on the device, so that a quarter of the data travels."""
    return pixels.to(device, non_blocking=True).float().div_(255)


def fill_colour(classifier: Classifier, images: Tensor) -> Float[Tensor, "c 1 1"]:
    """The colour of a masked pixel: the classifier's `fill`, else mid-grey."""
    channels = images.shape[1]
    fill = getattr(classifier, "fill", None)
    values = [0.5] * channels if fill is None else [float(v) for v in fill]
    if len(values) != channels:
        raise InputError(f"the classifier's fill has {len(values)} channels, the images have {channels}")
    return torch.tensor(values, dtype=images.dtype, device=images.device)[:, None, None]


def occlude(
    images: Float[Tensor, "*b c h w"], keep: Bool[Tensor, "*#b 1 h w"], fill: Float[Tensor, "c 1 1"]
) -> Float[Tensor, "*b c h w"]:
    """x ⊙ m. A choice, not a product: the hidden pixels are gone, NaN and all."""
    return torch.where(keep, images, fill)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products and convolutions here, or forbid it; afterwards as before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def _arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Run in exactly this precision; float32 means float32 (cuDNN would use TF32 by default)."""
    autocast = torch.autocast(device.type, dtype=AUTOCAST.get(precision), enabled=precision in AUTOCAST)
    with tf32(precision != "fp32"), autocast:
        yield


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """In eval mode here, and afterwards every module in the mode it was in."""
    modules = list(classifier.modules()) if isinstance(classifier, nn.Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def forward(
    classifier: Classifier, images: Float[Tensor, "b c h w"], *, precision: Precision = "fp32"
) -> Float[Tensor, "b classes"]:
    """Logits in float32, computed in `precision`, without gradients, by a classifier in eval mode."""
    if isinstance(classifier, nn.Module) and any(m.training for m in classifier.modules()):
        raise CheckError("the classifier is in training mode, so its answers change; call classifier.eval() first")
    with torch.inference_mode(), _arithmetic(precision, images.device):
        return classifier(images).float()


class Copies(NamedTuple):
    """Masked copies to evaluate: copy j is image `image[j]` under masks `first[j]` and `second[j]` together."""

    image: Int64[Tensor, " j"]
    first: Int64[Tensor, " j"]
    second: Int64[Tensor, " j"]

    def chunks(self, size: int) -> Iterator[Copies]:
        for parts in zip(*(t.split(size) for t in self), strict=True):
            yield Copies(*parts)


@torch.no_grad()
def evaluate_copies(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    keep: Bool[Tensor, "n 1 h w"],
    copies: Copies,
    read: Callable[[Tensor, Tensor], Tensor],
    *,
    chunk: int,
    precision: Precision = "fp32",
) -> Tensor:
    """read(F(x_b ⊙ m0 ⊙ m1), b) for every copy, a chunk at a time."""
    fill = fill_colour(classifier, images)
    answers = []
    for part in copies.chunks(chunk):
        masked = occlude(images[part.image], keep[part.first] & keep[part.second], fill)
        answers.append(read(forward(classifier, masked, precision=precision), part.image))
    return torch.cat(answers) if answers else images.new_zeros(0)


def label_range(labels: Int64[Tensor, " b"]) -> tuple[int, int] | None:
    """The smallest and the largest label, read once so that checks need no further synchronisation."""
    return (int(labels.min()), int(labels.max())) if len(labels) else None


def require_classes(labels: tuple[int, int] | None, classes: int) -> None:
    """Refuse labels that are no output of the classifier."""
    if labels is not None and not 0 <= labels[0] <= labels[1] < classes:
        raise InputError(
            f"labels run from {labels[0]} to {labels[1]}, but the classifier has the outputs 0 to {classes - 1}"
        )


def top_two(logits: Float[Tensor, "j classes"]) -> tuple[Int64[Tensor, " j"], Float[Tensor, " j"]]:
    """The label (ties: the smallest) and the gap to the runner-up."""
    label = logits.argmax(dim=1)
    rest = logits.scatter(1, label[:, None], -torch.inf).amax(dim=1)
    return label, logits.gather(1, label[:, None])[:, 0] - rest


def label_margin(logits: Float[Tensor, "j classes"], labels: Int64[Tensor, " j"]) -> Float[Tensor, " j"]:
    """Logit of the label minus the largest other one: negative when another label wins."""
    rest = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
    return logits.gather(1, labels[:, None])[:, 0] - rest


def clean_labels(
    classifier: Classifier, images: Float[Tensor, "b c h w"], *, engine: Engine | None = None
) -> Int64[Tensor, " b"]:
    """F(x), no mask at all: the undefended answer."""
    engine = engine or Engine()
    answers = []
    for part in images.split(engine.chunk):
        label, gap = top_two(forward(classifier, part, precision=engine.precision))
        again = ~(gap >= engine.tau)
        if engine.precision != "fp32" and again.any():
            label[again] = top_two(forward(classifier, part[again]))[0]
        answers.append(label)
    return torch.cat(answers)


@dataclass
class TwoMaskTable:
    """F(x_b ⊙ m0 ⊙ m1), cell by cell: a cell is evaluated when first asked for, once, and remembered.

    Cells are unions of masks (`MaskSet.unions`), so pairs that hide the same pixels share one. `labels`, when given,
    are the answers that `margin` is measured against; without them a margin is the gap to the runner-up.
    """

    classifier: Classifier
    images: Float[Tensor, "b c h w"]
    masks: MaskSet
    labels: Int64[Tensor, " b"] | None = None
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self) -> None:
        if tuple(self.images.shape[-2:]) != self.masks.image_size:
            raise InputError(
                f"the images are {tuple(self.images.shape[-2:])}, the masks are for {self.masks.image_size}; "
                "resize the images, or build the threat and masks for their size"
            )
        device, unions = self.images.device, self.masks.unions
        shape = len(self.images), len(unions)
        self.keep = self.masks.keep(device)
        self.first, self.second = unions.first.to(device), unions.second.to(device)
        self.of_pair = unions.of_pair.to(device)
        self.known = torch.zeros(shape, dtype=torch.bool, device=device)
        self.label = torch.zeros(shape, dtype=torch.int64, device=device)
        self.gap = torch.zeros(shape, dtype=torch.float32, device=device)
        self.margin = torch.zeros(shape, dtype=torch.float32, device=device)
        self.forwards = torch.zeros(len(self.images), dtype=torch.int64, device=device)
        self.range = None if self.labels is None else label_range(self.labels)

    def evaluate(self, image: Int64[Tensor, " j"], union: Int64[Tensor, " j"]) -> None:
        """Make these cells known."""
        cells = torch.zeros_like(self.known)
        cells[image, union] = True  # each cell once, however often it was named
        image, union = torch.nonzero(cells & ~self.known, as_tuple=True)
        self._pass(image, union, precision=self.engine.precision)
        self.known[image, union] = True
        if self.engine.precision != "fp32":
            again = ~(self.gap[image, union] >= self.engine.tau)
            self._pass(image[again], union[again], precision="fp32")

    def evaluate_all(self) -> None:
        """Make every cell known."""
        image, union = torch.nonzero(~self.known, as_tuple=True)
        self.evaluate(image, union)

    def _pass(self, image: Tensor, union: Tensor, *, precision: Precision) -> None:
        def read(logits: Tensor, of_image: Tensor) -> Tensor:
            require_classes(self.range, int(logits.shape[1]))
            label, gap = top_two(logits)
            margin = gap if self.labels is None else label_margin(logits, self.labels[of_image])
            return torch.stack([label.float(), gap, margin], dim=1)  # labels below 2²⁴ are exact

        if not len(image):
            return
        copies = Copies(image, self.first[union], self.second[union])
        answers = evaluate_copies(
            self.classifier, self.images, self.keep, copies, read, chunk=self.engine.chunk, precision=precision
        )
        self.label[image, union] = answers[:, 0].long()
        self.gap[image, union] = answers[:, 1]
        self.margin[image, union] = answers[:, 2]
        self.forwards.index_add_(0, image, torch.ones_like(image))

    def against(self, labels: Int64[Tensor, " b"]) -> TwoMaskTable:
        """Measure margins against these labels from now on; what is known is kept.

        In a known cell that answers another label only the gap is left, and −gap bounds the margin from above.
        """
        self.labels = labels
        self.margin = torch.where(self.label == labels[:, None], self.gap, -self.gap)
        return self

    def labels_under(self, image: Int64[Tensor, " j"], mask: Int64[Tensor, " j"]) -> Int64[Tensor, "j n"]:
        """The second round of copy (image, mask): its label under every further mask."""
        union = self.of_pair[mask]
        self.evaluate(image.repeat_interleave(union.shape[1]), union.flatten())
        return self.label[image[:, None], union]

    def one_mask_labels(self) -> Int64[Tensor, "b n"]:
        """The first round: F(x_b ⊙ m) for every image and mask."""
        union = self.of_pair.diagonal().expand(len(self.images), -1)
        rows = torch.arange(len(self.images), device=union.device)
        self.evaluate(rows.repeat_interleave(union.shape[1]), union.flatten())
        return self.label[rows[:, None], union]

    def right(self) -> Bool[Tensor, "b unions"]:
        """Which known cells answer their image's label, and by enough to answer so every time?"""
        if self.labels is None:
            raise InputError("a certificate is about a label; give the table labels, or call against(labels)")
        leads = (self.gap > 0) & (self.gap >= self.engine.tau_fp32)  # a tie is no lead, whatever τ
        return self.known & (self.label == self.labels[:, None]) & leads


def two_mask_labels(
    classifier: Classifier, images: Float[Tensor, "b c h w"], masks: MaskSet, *, engine: Engine | None = None
) -> Int64[Tensor, "b n n"]:
    """The whole table F(x_b ⊙ m0 ⊙ m1): entry [b, 0, 0] is one mask alone, the table is symmetric."""
    table = TwoMaskTable(classifier, images, masks, engine=engine or Engine())
    table.evaluate_all()
    return table.label[:, table.of_pair]
