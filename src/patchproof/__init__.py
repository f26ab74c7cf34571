"""Make image classifiers provably resistant to adversarial patches, and measure the proof."""

from patchproof.checks import check_classifier
from patchproof.defenses import Certificates, Defense, PatchCleanser
from patchproof.geometry import MaskSet, PatchThreat, Rect, covering_masks, native_footprint, native_threat
from patchproof.masking import Engine, occlude, two_mask_labels
from patchproof.training import masking_strategy
from patchproof.types import Classifier, Preprocessing

__version__ = "0.1.0"
__all__ = [
    "Certificates",
    "Classifier",
    "Defense",
    "Engine",
    "MaskSet",
    "PatchCleanser",
    "PatchThreat",
    "Preprocessing",
    "Rect",
    "check_classifier",
    "covering_masks",
    "masking_strategy",
    "native_footprint",
    "native_threat",
    "occlude",
    "two_mask_labels",
]
