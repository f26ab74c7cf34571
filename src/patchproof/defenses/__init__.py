"""Certified defences behind one protocol: `predict`, `certify` and `describe`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from patchproof.defenses._base import (
    Assessment,
    Certificates,
    Defense,
    assess,
    device_of,
    require_defense,
    require_returned,
    with_engine,
)
from patchproof.defenses._table import MaskedDefense, MaskTable
from patchproof.defenses.alarm import Alarm
from patchproof.defenses.ibp import IntervalBounds
from patchproof.defenses.local import BagCert, ClippedBagNet, PatchGuardBagNet
from patchproof.defenses.patchcleanser import PatchCleanser, double_masking, two_mask_labels
from patchproof.defenses.smoothing import DerandomizedSmoothing, PatchGuardSmoothing, SmoothedViT
from patchproof.geometry import PatchThreat
from patchproof.masking import Engine
from patchproof.types import Classifier, InputError, kind_of


@dataclass(frozen=True)
class DefenseEntry:
    """A defence by name: a description, and the class with its `Options` and the constructor `of`."""

    words: str
    kind: Any

    @property
    def options(self) -> type[Any]:
        return self.kind.Options


WORDS: Mapping[type[Any], str] = {
    PatchCleanser: "double masking: the right label under any patch (Xiang et al. 2022)",
    Alarm: "one round of masking: the right label or an alarm under any patch",
    DerandomizedSmoothing: "votes of views that show a band of the image (Levine & Feizi 2020)",
    SmoothedViT: "votes of fewer views, for ViTs that drop hidden tokens (Salman et al. 2022)",
    ClippedBagNet: "clipped local logits of a BagNet (Zhang et al. 2020)",
    PatchGuardBagNet: "local logits without each class's most evident window (Xiang et al. 2021)",
    PatchGuardSmoothing: "votes of views without each class's most evident window (Xiang et al. 2021)",
    BagCert: "local scores trained for their certificate (Metzen & Yatsura 2021)",
    IntervalBounds: "interval bounds: the right label under any patch, of networks made for it (Chiang et al. 2020)",
}
DEFENSES: Mapping[str, DefenseEntry] = {kind.name: DefenseEntry(words, kind) for kind, words in WORDS.items()}
"""The defences that `defense` and the command line know by name."""


def defense(
    name: str, classifier: Classifier, threat: PatchThreat, *, engine: Engine | None = None, **options: Any
) -> Any:
    """Build a defence by name, e.g. `defense("patchcleanser", classifier, threat, per_axis=6)`."""
    if not isinstance(name, str):
        raise InputError(
            f'name must be text, e.g. pp.defense("patchcleanser", classifier, threat), not {kind_of(name)}'
        )
    if name not in DEFENSES:
        near = difflib.get_close_matches(name, DEFENSES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(DEFENSES)}"
        raise InputError(f"unknown defence `{name}`; {hint}")
    entry = DEFENSES[name]
    known = list(entry.options.__dataclass_fields__)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InputError(f"the defence `{name}` has no option {unknown[0]!r}; it has {', '.join(known)}")
    if not isinstance(threat, PatchThreat):
        raise InputError(f"threat must be a pp.PatchThreat, e.g. PatchThreat.square(…), not {kind_of(threat)}")
    return entry.kind.of(classifier, threat, engine=engine or Engine(), **asdict(entry.options(**options)))


__all__ = [
    "DEFENSES",
    "Alarm",
    "Assessment",
    "BagCert",
    "Certificates",
    "ClippedBagNet",
    "Defense",
    "DefenseEntry",
    "DerandomizedSmoothing",
    "IntervalBounds",
    "MaskTable",
    "MaskedDefense",
    "PatchCleanser",
    "PatchGuardBagNet",
    "PatchGuardSmoothing",
    "SmoothedViT",
    "assess",
    "defense",
    "device_of",
    "double_masking",
    "require_defense",
    "require_returned",
    "two_mask_labels",
    "with_engine",
]
