"""What a certified defence is: an answer, and a proof about that answer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Result = TypeVar("Result", "Certificates", "Assessment")


@dataclass(frozen=True)
class Certificates:
    """What was proved of each image, and at what cost.

    `margin` is the smallest lead of the label's logit over the runner-up among the copies evaluated; negative when a
    copy answers another label, so for an image given up early it bounds the true minimum from above. `witness` names
    the two masks of that copy (the failing pair, or else the weakest one) and `witness_label` what it answered.
    `forwards` counts the passes this image took.
    """

    certified: Bool[Tensor, " b"]
    margin: Float[Tensor, " b"]
    forwards: Int64[Tensor, " b"]
    witness: Int64[Tensor, "b 2"]
    witness_label: Int64[Tensor, " b"]

    def to(self, device: torch.device | str) -> Certificates:
        return _moved(self, device)


@dataclass(frozen=True)
class Assessment:
    """A defence's answers together with certificates about `labels`; `unanimous`: the first round agreed."""

    predictions: Int64[Tensor, " b"]
    labels: Int64[Tensor, " b"]
    certificates: Certificates
    unanimous: Bool[Tensor, " b"]

    def to(self, device: torch.device | str) -> Assessment:
        return _moved(self, device)


def _moved(result: Result, device: torch.device | str) -> Result:
    return replace(result, **{f.name: getattr(result, f.name).to(device) for f in fields(result)})


@runtime_checkable
class Defense(Protocol):
    """A certified image keeps its label under every patch of the threat: predict(x') = y for all x' ∈ 𝓐_𝓡(x)."""

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]: ...

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates: ...

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment: ...
