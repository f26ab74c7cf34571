"""From batches of labelled images to one record an image."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses import Assessment, Defense
from patchproof.masking import Runner, clean_labels
from patchproof.records import Record, Witness


def evaluate_batch(
    defense: Defense,
    runner: Runner,
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    indices: Sequence[int],
    paths: Sequence[str],
) -> list[Record]:
    """Undefended (by the bare classifier of `runner`), defended and certified, for each image of a batch.

    `forwards` counts the masked copies that the answer and the certificate took together; the one unmasked pass of the
    undefended answer is not part of the defence.
    """
    undefended = clean_labels(runner, images) == labels
    assessment = defense.assess(images, labels)
    return _records(assessment.to("cpu"), undefended.tolist(), indices, paths)


def _records(
    assessment: Assessment, undefended: Sequence[bool], indices: Sequence[int], paths: Sequence[str]
) -> list[Record]:
    found = assessment.certificates
    defended = (assessment.predictions == assessment.labels).tolist()
    return [
        Record(
            index=index,
            path=paths[row],
            label=int(assessment.labels[row]),
            undefended=undefended[row],
            defended=defended[row],
            certified=bool(found.certified[row]),
            margin=_rounded(float(found.margin[row])),
            forwards=int(found.forwards[row]),
            witness=Witness((int(found.witness[row, 0]), int(found.witness[row, 1])), int(found.witness_label[row])),
        )
        for row, index in enumerate(indices)
    ]


def _rounded(margin: float) -> float | None:
    """Six decimals; None where the classifier answered NaN."""
    return round(margin, 6) if math.isfinite(margin) else None
