"""When does y stay ahead whatever the patch says? Rules on evidence, the same for votes and for local scores.

`low` and `high` bound the evidence "b classes n" of every cell (view) of the clean image from below and above, so that
rounding cannot break a rule: what speaks for y is counted at its least, what speaks for another class at its most.
Each rule returns y's lead over every class under every patch, "b classes a"; certified iff all leads are positive.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses._base import Certificates
from patchproof.geometry import Windows

NUMBERS_AT_ONCE = 1 << 24
"""That a rule holds in memory: some 130 MB."""


def of_label(values: Float[Tensor, "b classes n"], labels: Int64[Tensor, " b"]) -> Float[Tensor, "b 1 n"]:
    return values.gather(1, labels[:, None, None].expand(-1, 1, values.shape[2]))


def bounded_lead(
    low: Float[Tensor, "b classes n"],
    high: Float[Tensor, "b classes n"],
    labels: Int64[Tensor, " b"],
    windows: Windows,
    *,
    least: float,
    most: float,
) -> Float[Tensor, "b classes a"]:
    """Σ_{∉A(p)} e_y + |A(p)|·least − Σ_{∉A(p)} e_c − |A(p)|·most: inside A(p) the patch says what suits it best."""
    ours, theirs = windows.outside(of_label(low, labels)), windows.outside(high)
    return ours - theirs - (most - least) * windows.sizes


def counted_lead(
    low: Float[Tensor, "b classes n"], high: Float[Tensor, "b classes n"], labels: Int64[Tensor, " b"], windows: Windows
) -> Float[Tensor, "b classes 1"]:
    """n_y − n_c − 2Δ, Δ = max_p |A(p)|: the patch turns at most Δ votes from y to c (Levine & Feizi 2020)."""
    ours, theirs = of_label(low, labels).sum(dim=2, keepdim=True), high.sum(dim=2, keepdim=True)
    return ours - theirs - 2 * int(windows.sizes.max())


def robust_masking(evidence: Float[Tensor, "b classes n"], windows: Windows) -> Float[Tensor, "b classes"]:
    """s_c = Σ e_c − max_W Σ_W e_c: each class without its most evident window (Xiang et al. 2021)."""
    return windows.outside(evidence).amin(dim=2)


def robust_masking_lead(
    low: Float[Tensor, "b classes n"], high: Float[Tensor, "b classes n"], labels: Int64[Tensor, " b"], windows: Windows
) -> Float[Tensor, "b classes a"]:
    """min_W Σ_{∉ A(p) ∪ W} e_y − Σ_{∉A(p)} e_c, for evidence of at least 0.

    The patch can empty A(p) for y, and masking then takes another window W away from it. What the patch adds to c lies
    in A(p), which is a window too, so masking takes at least as much away. No W takes more than one it lies inside of,
    but a smaller A(p) can give a smaller lead.
    """
    ours, beyond = of_label(low, labels)[:, 0], (~windows.touched).to(low)
    part = max(1, NUMBERS_AT_ONCE // max(1, ours.numel() + len(ours) * len(beyond)))
    left = [windows.maximal.outside(ours[:, None] * some).amin(dim=2) for some in beyond.split(part)]
    return torch.cat(left, dim=1)[:, None] - windows.outside(high)


def certificates(
    lead: Float[Tensor, "b classes a"],
    labels: Int64[Tensor, " b"],
    windows: Windows,
    *,
    passes: Int64[Tensor, " b"],
    above: float,
) -> Certificates:
    """Certified iff y leads every other class under every patch by more than `above`; `worst` says where it leads
    least, and over which label."""
    own = torch.arange(lead.shape[1], device=lead.device) == labels[:, None]
    least, place = lead.masked_fill(own[:, :, None], torch.inf).min(dim=2)
    margin, rival = least.min(dim=1)
    worst = {"worst.label": rival}
    if lead.shape[2] == len(windows.places):  # a rule that counts names no place
        worst["worst.place"] = windows.places[place.gather(1, rival[:, None])[:, 0]]
    return Certificates(margin > above, margin.float(), passes, worst)
