"""Rules on evidence (votes of views or scores of cells) that prove that y leads whatever the patch shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses._base import Assessment, Certificates, OwnDefense, require_labels
from patchproof.geometry import Windows
from patchproof.masking import require_images
from patchproof.types import note

NUMBERS_AT_ONCE = 1 << 24
"""Numbers that a rule holds in memory at once: some 130 MB."""


class Evidence(NamedTuple):
    """Evidence of every cell (or view) for each class; a patch changes only the cells in A(p).

    `low` and `high` bound the evidence that any evaluation of the clean image can find. Rules count the evidence for y
    at its lower bound and that for other classes at its upper bound, so that rounding cannot break them.
    """

    found: Float[Tensor, "b classes n"]
    low: Float[Tensor, "b classes n"]
    high: Float[Tensor, "b classes n"]
    windows: Windows
    """The cells A(p) that each patch p touches."""
    passes: Int64[Tensor, " b"]

    def of_label(self, labels: Int64[Tensor, " b"]) -> Float[Tensor, "b 1 n"]:
        """Lower bounds of the evidence for y."""
        return self.low.gather(1, labels[:, None, None].expand(-1, 1, self.low.shape[2]))


class EvidenceDefense(OwnDefense):
    """Base class: predict the class with the most evidence, and certify y if its `lead` always exceeds `above`.

    The lead is taken over every other class, under every patch; the evidence of a cell lies between `least` and `most`.
    """

    evidence: ClassVar[Sequence[str]] = ("worst",)
    least: ClassVar[float] = 0
    most: ClassVar[float] = 1
    above: ClassVar[float] = 0
    parts: ClassVar[tuple[str, str]] = "cells", "a network of smaller receptive field"
    """For messages: the cells' name, and the change that makes a patch touch fewer of them."""

    def gather(self, images: Float[Tensor, "b c h w"]) -> Evidence:
        raise NotImplementedError

    def scores(self, evidence: Float[Tensor, "b classes n"], windows: Windows) -> Float[Tensor, "b classes"]:
        """The score of each class; the prediction is their argmax, among equals the smallest label."""
        return evidence.sum(dim=2)

    def lead(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> Float[Tensor, "b classes a"]:
        """Σ_{∉A(p)} e_y + |A(p)|·least − Σ_{∉A(p)} e_c − |A(p)|·most: inside A(p) the patch chooses the evidence."""
        windows = evidence.windows
        ours, theirs = windows.outside(evidence.of_label(labels)), windows.outside(evidence.high)
        return ours - theirs - (self.most - self.least) * windows.sizes

    def prove(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> Certificates:
        return self.certificates(self.lead(evidence, labels), evidence, labels)

    def certificates(
        self, lead: Float[Tensor, "b classes a"], evidence: Evidence, labels: Int64[Tensor, " b"]
    ) -> Certificates:
        """Certificates from the leads; `worst` names the location and the other label for which y leads least."""
        own = torch.arange(lead.shape[1], device=lead.device) == labels[:, None]
        least, place = lead.masked_fill(own[:, :, None], torch.inf).min(dim=2)
        margin, rival = least.min(dim=1)
        where = evidence.windows.places[place.gather(1, rival[:, None])[:, 0]]
        worst = {"worst.label": rival, "worst.place": where}
        return Certificates(margin > self.above, margin.float(), evidence.passes, worst)

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        require_images(images, self.threat.image_size)
        evidence = self.gather(images)
        return self.scores(evidence.found, evidence.windows).argmax(dim=1)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        return self.assess(images, labels).certificates

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from the same evidence."""
        require_images(images, self.threat.image_size)
        self.measure(images)
        evidence = self.gather(images)
        predictions = self.scores(evidence.found, evidence.windows).argmax(dim=1)
        asked = predictions if labels is None else labels.to(images.device)
        require_labels(asked, len(images), classes=evidence.found.shape[1])
        proof = self.prove(evidence, asked)
        if len(images) and not proof.certified.any():
            self.note_hopeless(evidence.windows)
        return Assessment(predictions, proof)

    def note_hopeless(self, windows: Windows) -> None:
        """Tell the user if not even an image is certified whose cells all have the most evidence for class 0."""
        cells, label = windows.touched.shape[1], windows.places.new_zeros(1)
        most = torch.tensor([self.most, self.least], dtype=torch.float64, device=label.device)
        best = most[None, :, None].expand(1, 2, cells)
        if not self.prove(Evidence(best, best, best, windows, label), label).certified.any():
            things, remedy = self.parts
            note(
                f"no image can be certified by {self.name}: {self.threat.words} can touch {int(windows.sizes.max())} "
                f"of {cells} {things}; take a smaller patch, or {remedy}"
            )


class RobustMasking(EvidenceDefense):
    """Robust masking (PatchGuard; Xiang et al., USENIX Security 2021): s_c = Σ e_c − max_W Σ_W e_c.

    Each class loses the window with the most evidence for it; evidence is at least 0.
    """

    def scores(self, evidence: Float[Tensor, "b classes n"], windows: Windows) -> Float[Tensor, "b classes"]:
        return windows.outside(evidence).amin(dim=2)

    def lead(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> Float[Tensor, "b classes a"]:
        """min_W Σ_{∉ A(p) ∪ W} e_y − Σ_{∉A(p)} e_c.

        The patch can erase the evidence for y in A(p), and masking then removes another window W from y. The evidence
        that the patch adds to c lies in A(p), which is a window too, so masking removes at least as much from c. Only
        maximal windows W matter, because larger ones remove more; but a smaller A(p) can give a smaller lead.
        """
        windows, ours = evidence.windows, evidence.of_label(labels)[:, 0]
        untouched = (~windows.touched).to(ours)
        part = max(1, NUMBERS_AT_ONCE // max(1, ours.numel() + len(ours) * len(untouched)))
        left = [windows.maximal.outside(ours[:, None] * some).amin(dim=2) for some in untouched.split(part)]
        return torch.cat(left, dim=1)[:, None] - windows.outside(evidence.high)
