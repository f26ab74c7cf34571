"""From batches of labelled images to one record an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.attacks import Attack, Attacked, attack_in_turn
from patchproof.defenses import Assessment, Defense
from patchproof.masking import Runner, clean_labels
from patchproof.records import AttackRecord, Record, Witness


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


@dataclass(frozen=True)
class Break:
    """A certified image and the patch under which the defence answers otherwise: a counterexample to the proof."""

    record: AttackRecord
    image: Float[Tensor, "c h w"]
    patched: Float[Tensor, "c h w"]


def attack_batch(
    records: Sequence[Record],
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    undefended: Sequence[Attack] = (),
    defended: Sequence[Attack] = (),
    only_certified: bool = False,
    seed: int = 0,
) -> tuple[list[AttackRecord], list[Break]]:
    """What patches do to a batch that `evaluate_batch` has looked at: certified ≤ attacked ≤ defended, per image.

    `undefended` and `defended` are the attacks on the classifier and on the defence, each run in turn; none, and that
    target is left alone.
    """
    every = list(range(len(records)))
    chosen = [row for row in every if records[row].certified or not only_certified]
    alone = _attack_rows(undefended, every, records, images, labels, seed)
    behind = _attack_rows(defended, chosen, records, images, labels, seed)
    found = [_attack_record(record, alone.get(row), behind.get(row)) for row, record in enumerate(records)]
    breaks = [Break(record, images[row], behind[row].images[0]) for row, record in enumerate(found) if record.broken]
    return found, breaks


def _attack_rows(
    attacks: Sequence[Attack],
    rows: Sequence[int],
    records: Sequence[Record],
    images: Tensor,
    labels: Tensor,
    seed: int,
) -> dict[int, Attacked]:
    """The outcome for each of these rows, as a batch of one."""
    if not attacks or not rows:
        return {}
    some = torch.tensor(rows, device=images.device)
    found = attack_in_turn(attacks, images[some], labels[some], seed=seed, indices=[records[r].index for r in rows])
    return {row: found[position] for position, row in enumerate(rows)}


def _attack_record(record: Record, alone: Attacked | None, behind: Attacked | None) -> AttackRecord:
    outcomes = [outcome for outcome in (alone, behind) if outcome is not None]
    broken = behind is not None and bool(behind.broken)
    # A wrong answer to the clean image needs no patch; if it is certified all the same, the case is kept as it is.
    by_patch = behind if broken and (record.defended or record.certified) else None
    place = None if by_patch is None else by_patch.places[0]
    return AttackRecord(
        **vars(record),
        undefended_attacked=None if alone is None else not bool(alone.broken),
        attacked=None if behind is None else not broken,
        place=None if place is None else (place.top, place.left, place.height, place.width),
        attacked_label=None if by_patch is None else int(by_patch.predictions),
        passes=sum(int(outcome.passes) for outcome in outcomes),
        queries=sum(int(outcome.queries) for outcome in outcomes),
    )
