"""Attacks on certified images, and the files kept of patches that changed an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from patchproof.attacks import (
    Attack,
    Attacked,
    AttackPlan,
    OnStep,
    attack_in_turn,
    defended_attacks,
    undefended_attacks,
)
from patchproof.defenses import device_of, with_engine
from patchproof.geometry import as_places, rects_of
from patchproof.masking import Evaluator
from patchproof.models import write_state
from patchproof.runs._folder import write_json
from patchproof.runs._measure import engine_of
from patchproof.runs._record import AttackFindings, Record


class Attacker:
    """Attacks images one at a time. Its attacks are built at the first image, when the defence has its engine."""

    def __init__(self, plan: AttackPlan, on_step: OnStep | None = None) -> None:
        self.plan, self.on_step = plan, on_step
        self.attacks: tuple[Sequence[Attack], Sequence[Attack]] | None = None

    def __call__(
        self, defense: Any, record: Record, image: Float[Tensor, "1 c h w"], label: Int64[Tensor, "1"]
    ) -> tuple[Record, dict[str, Tensor]]:
        """Attack one image; return its record with the findings, and the pixels to keep."""
        self.attacks = self.attacks or attacks_on(defense, self.plan, self.on_step)
        on_classifier, on_defense = self.attacks
        if self.plan.only_certified and not record.certified:
            on_defense = ()
        attacked = partial(attack_in_turn, seed=self.plan.seed, indices=[record.index])
        alone = attacked(on_classifier, image, label) if on_classifier else None
        behind = attacked(on_defense, image, label) if on_defense else None
        outcomes = [outcome for outcome in (alone, behind) if outcome is not None]
        # A wrong answer to the clean image needs no patch. If that image is certified all the same, the case is kept.
        by_patch = behind if behind is not None and behind.broken and (record.defended or record.certified) else None
        found = AttackFindings(
            undefended_attacked=None if alone is None else not bool(alone.broken),
            attacked=None if behind is None else not bool(behind.broken),
            place=None if by_patch is None else by_patch.places[0],
            attacked_label=None if by_patch is None else int(by_patch.predictions),
            passes=sum(int(outcome.passes) for outcome in outcomes),
            queries=sum(int(outcome.queries) for outcome in outcomes),
        )
        record = replace(record, attack=found)
        kept: dict[str, Tensor] = {}
        if alone is not None and record.undefended and not found.undefended_attacked:
            kept |= patch_pixels("undefended", alone)
        if by_patch is not None:
            kept |= patch_pixels("defended", by_patch)
            if record.broken:
                kept |= {"image": image[0].cpu(), "patched": by_patch.images[0].cpu()}
        return record, kept

    def save(self, folder: Path, defense: Any, record: Record, kept: Mapping[str, Tensor]) -> None:
        """Save patches that changed a right answer as patches/INDEX.safetensors.

        For a certified image, broken/INDEX gets pictures, the exact pixels, and the defence's tables of the image
        without and with the patch.
        """
        patches = {name: tensor for name, tensor in kept.items() if name not in ("image", "patched")}
        if patches:
            path = folder / "patches" / f"{record.index}.safetensors"
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".part")
            write_state(patches, temporary)
            temporary.replace(path)
        if "patched" not in kept:
            return
        image, patched, place = kept["image"], kept["patched"], folder / "broken" / str(record.index)
        place.mkdir(parents=True, exist_ok=True)
        found = record.attack or AttackFindings()
        pixels = {"image": image, "patched": patched}
        for number, (top, left, height, width) in enumerate(found.places, start=1):
            name = "patch" if number == 1 else f"patch_{number}"
            pixels[name] = patched[:, top : top + height, left : left + width]
        write_state(pixels, place / "pixels.safetensors")
        for name, tensor in pixels.items():
            values = (tensor.clamp(0, 1) * 255).round().byte()
            picture = values[0] if len(values) == 1 else values.permute(1, 2, 0)
            Image.fromarray(picture.contiguous().numpy()).save(place / f"{name}.png")
        tables = {}
        if hasattr(defense, "explain"):
            judge, device = as_judge(defense), device_of(defense)
            tables["clean_table"] = judge.explain(image.to(device))
            tables["patched_table"] = judge.explain(patched.to(device))
        engine, masks = getattr(defense, "engine", None), getattr(defense, "masks", None)
        facts = {
            "index": record.index,
            "path": record.path,
            "label": record.label,
            "place": found.place,
            "answer_to_patched": found.attacked_label,
            **tables,
            "defense": defense.describe(),
            "masks": None if masks is None else asdict(masks),
            "engine": None if engine is None else asdict(engine),
            "reproduce": "build the defence as described, load pixels.safetensors, and call "
            "defense.predict(patched[None]); docs/attacks.md has the lines",
        }
        write_json(place / "tables.json", facts)


def attacks_on(
    defense: Any, plan: AttackPlan, on_step: OnStep | None = None
) -> tuple[Sequence[Attack], Sequence[Attack]]:
    """Build the attacks on the classifier alone, and those on the defence."""
    classifier = getattr(defense, "classifier", None)
    alone: Sequence[Attack] = ()
    if classifier is not None and plan.target != "defended":
        bare = Evaluator(classifier, engine_of(defense), strict=False)
        alone = undefended_attacks(bare, defense.threat, plan, on_step=on_step)
    behind: Sequence[Attack] = ()
    if plan.target != "undefended":
        behind = defended_attacks(as_judge(defense), plan, on_step=on_step)
    return alone, behind


def patch_pixels(name: str, outcome: Attacked) -> dict[str, Tensor]:
    """Pixels (c p q) and location (top, left, height, width) of each patch, and the answer to the patched image.

    The names of a second patch end in `_2`.
    """
    found = {f"{name}_label": outcome.predictions[0].cpu()}
    for number, rect in enumerate(rects_of(outcome.places[0]), start=1):
        one = name if number == 1 else f"{name}_{number}"
        found[one] = outcome.images[0, :, rect.top : rect.bottom, rect.left : rect.right].cpu()
        found[f"{one}_place"] = as_places(rect)[0]
    return found


def as_judge(defense: Any) -> Any:
    """Return the defence for hostile images: float32 decides each label that the fast precision misjudges."""
    if not (hasattr(defense, "evaluator") and hasattr(defense, "with_engine")):
        return defense
    judge: Any = with_engine(defense, defense.engine)  # a copy: the defence itself stays strict
    judge.evaluator.strict = False
    return judge
