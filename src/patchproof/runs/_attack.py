"""An attack: a certification of the same images, and patches on them. For recovery, certified ≤ attacked ≤ defended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from patchproof.attacks import Attacked, AttackPlan, attack_in_turn, defended_attacks, undefended_attacks
from patchproof.defenses import Defense, MaskedDefense, device_of
from patchproof.masking import Engine, Evaluator
from patchproof.runs._files import dump_json, write_atomically
from patchproof.runs._manifest import mask_facts
from patchproof.runs._record import ATTACK_ACCURACIES, AttackFindings, Rate, Record, Tally
from patchproof.runs._session import Break, Results, Session
from patchproof.runs.executors import Executor
from patchproof.types import InputError, Preprocessing

IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class AttackResults(Results):
    """What an attack found: `broken` are certificates that fell, which must not be."""

    @property
    def attacked(self) -> Rate:
        """The defence under attack: an upper bound on robust accuracy."""
        return self.rates["attacked"]

    @property
    def undefended_attacked(self) -> Rate:
        return self.rates["undefended_attacked"]

    @property
    def broken(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.broken)


def attack(
    defense: Defense,
    data: Any,
    plan: AttackPlan | None = None,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    executor: Executor | None = None,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    on_start: Callable[[Tally, int], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttackResults:
    """Certify images and attack them with patches, white-box, on the classifier and adaptively on the defence.

    A certified image whose answer a patch changes is kept in `folder`/broken with its pixels. Everything else is as in
    `certify`.
    """
    chosen = AttackPlan() if plan is None else plan
    if not isinstance(chosen, AttackPlan):
        raise InputError(f"plan must be an AttackPlan, e.g. AttackPlan(steps=40), not {chosen!r}")
    options = {name: value for name, value in locals().items() if name not in ("plan", "chosen")}
    described = {f.name: getattr(chosen, f.name) for f in fields(AttackPlan)}
    options |= {"plan": described, "evaluate": Attacker(chosen), "on_break": save_break}
    session = Session("attack", ATTACK_ACCURACIES, **options, images_at_once=IMAGES_AT_ONCE)
    return AttackResults(**vars(session.execute()))


class Attacker:
    """Attacks batches that have been certified; what it attacks is built when the first one comes."""

    def __init__(self, plan: AttackPlan) -> None:
        self.plan = plan
        self.attacks: tuple[list[Any], list[Any]] | None = None

    def __call__(
        self, defense: Any, records: Sequence[Record], images: Tensor, labels: Tensor
    ) -> tuple[list[Record], list[Break]]:
        alone, behind = self.attacks = self.attacks or self.build(defense)
        every = list(range(len(records)))
        chosen = [row for row in every if records[row].certified or not self.plan.only_certified]
        undefended = self.run(alone, every, records, images, labels)
        defended = self.run(behind, chosen, records, images, labels)
        found = [
            replace(record, attack=findings(record, undefended.get(row), defended.get(row)))
            for row, record in enumerate(records)
        ]
        breaks = [
            Break(record.index, images[row].cpu(), defended[row].images[0].cpu())
            for row, record in enumerate(found)
            if record.broken
        ]
        return found, breaks

    def build(self, defense: Any) -> tuple[list[Any], list[Any]]:
        """On the classifier alone and on the defence."""
        classifier, engine = getattr(defense, "classifier", None), getattr(defense, "engine", None) or Engine()
        alone = []
        if classifier is not None and self.plan.target != "defended":
            alone = undefended_attacks(Evaluator(classifier, engine, strict=False), defense.threat, self.plan)
        return alone, defended_attacks(
            as_judge(defense), self.plan, engine=engine
        ) if self.plan.target != "undefended" else []

    def run(
        self, attacks: Sequence[Any], rows: Sequence[int], records: Sequence[Record], images: Tensor, labels: Tensor
    ) -> dict[int, Attacked]:
        """The outcome for each of these rows, as a batch of one."""
        if not attacks or not rows:
            return {}
        some = torch.tensor(rows, device=images.device)
        indices = [records[row].index for row in rows]
        found = attack_in_turn(attacks, images[some], labels[some], seed=self.plan.seed, indices=indices)
        return {row: found[position] for position, row in enumerate(rows)}


def as_judge(defense: Any) -> Any:
    """The defence for hostile images: where the fast precision misjudges one, the float32 label is taken."""
    if not isinstance(defense, MaskedDefense):
        return defense
    judge = replace(defense)
    judge.evaluator.strict = False
    return judge


def findings(record: Record, alone: Attacked | None, behind: Attacked | None) -> AttackFindings:
    outcomes = [outcome for outcome in (alone, behind) if outcome is not None]
    broken = behind is not None and bool(behind.broken)
    # A wrong answer to the clean image needs no patch; if it is certified all the same, the case is kept as it is.
    by_patch = behind if broken and (record.defended or record.certified) else None
    place = None if by_patch is None else by_patch.places[0]
    return AttackFindings(
        undefended_attacked=None if alone is None else not bool(alone.broken),
        attacked=None if behind is None else not broken,
        place=None if place is None else (place.top, place.left, place.height, place.width),
        attacked_label=None if by_patch is None else int(by_patch.predictions),
        passes=sum(int(outcome.passes) for outcome in outcomes),
        queries=sum(int(outcome.queries) for outcome in outcomes),
    )


def save_break(folder: Path, found: Break, record: Record, defense: Any) -> Path:
    """folder/broken/INDEX: pictures, exact pixels, and the defence's tables of the image before and after."""
    place = folder / "broken" / str(found.index)
    place.mkdir(parents=True, exist_ok=True)
    findings = record.attack or AttackFindings()
    top, left, height, width = findings.place or (0, 0, 0, 0)
    pixels = {
        "image": found.image,
        "patched": found.patched,
        "patch": found.patched[:, top : top + height, left : left + width],
    }
    save_file({name: tensor.contiguous() for name, tensor in pixels.items()}, place / "pixels.safetensors")
    for name, tensor in pixels.items():
        values = (tensor.clamp(0, 1) * 255).round().byte()
        picture = values[0] if len(values) == 1 else values.permute(1, 2, 0)
        Image.fromarray(picture.contiguous().numpy()).save(place / f"{name}.png")
    engine, masks = getattr(defense, "engine", None), getattr(defense, "masks", None)
    tables = {}
    if hasattr(defense, "explain"):
        judge, device = as_judge(defense), device_of(defense)
        shown = {"clean_table": found.image, "patched_table": found.patched}
        tables = {name: judge.explain(image.to(device)) for name, image in shown.items()}
    facts = {
        "index": record.index,
        "path": record.path,
        "label": record.label,
        "place": findings.place,
        "answer_to_patched": findings.attacked_label,
        **tables,
        "defense": defense.describe(),
        "masks": None if masks is None else mask_facts(masks),
        "engine": None if engine is None else asdict(engine),
        "reproduce": "build the defence as described, load pixels.safetensors, and call "
        "defense.predict(patched[None]); docs/attacks.md has the lines",
    }
    write_atomically(place / "tables.json", dump_json(facts))
    return place
