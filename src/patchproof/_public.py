"""The public names. `patchproof` hands them on when they are first used: torch takes seconds to import."""

from patchproof.attacks import AttackPlan
from patchproof.data import open_dataset
from patchproof.defenses import (
    DEFENSES,
    Alarm,
    Certificates,
    Defense,
    PatchCleanser,
    defense,
    two_mask_labels,
)
from patchproof.geometry import MaskSet, PatchThreat, Rect, covering_masks, native_footprint, native_threat
from patchproof.masking import Engine, Ensemble, check_classifier, occlude
from patchproof.models import load_checkpoint, load_classifier
from patchproof.runs import attack, certify, predict, train
from patchproof.training import MaskingStrategy, Plan, masking_strategy
from patchproof.types import CheckError, Classifier, InputError, Preprocessing
from patchproof.version import __version__

__all__ = [
    "DEFENSES",
    "Alarm",
    "AttackPlan",
    "Certificates",
    "CheckError",
    "Classifier",
    "Defense",
    "Engine",
    "Ensemble",
    "InputError",
    "MaskSet",
    "MaskingStrategy",
    "PatchCleanser",
    "PatchThreat",
    "Plan",
    "Preprocessing",
    "Rect",
    "__version__",
    "attack",
    "certify",
    "check_classifier",
    "covering_masks",
    "defense",
    "load_checkpoint",
    "load_classifier",
    "masking_strategy",
    "native_footprint",
    "native_threat",
    "occlude",
    "open_dataset",
    "predict",
    "train",
    "two_mask_labels",
]
