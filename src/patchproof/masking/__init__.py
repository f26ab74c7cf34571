"""F(x ⊙ m): the only place where a classifier sees a masked image, with gradients or without.

Certification, prediction, the training search, attacks and the explorer all evaluate masked copies through one
`Evaluator`, in chunks of (image × mask): memory depends on the chunk, not on the batch or the number of masks.
"""

from patchproof.masking._arithmetic import AUTOCAST, Network, evaluating, network, tf32
from patchproof.masking._checks import check_classifier
from patchproof.masking._drift import Drift, margin_changes
from patchproof.masking._ensemble import Ensemble, Mirror, assembled, weight_names
from patchproof.masking._evaluator import SHARES, Answers, Audit, Copies, Evaluator, Redone
from patchproof.masking._images import (
    COPYING,
    MaskedForward,
    as_images,
    fill_colour,
    images_ahead,
    masks_for,
    occlude,
    require_images,
    show,
)
from patchproof.masking._logits import label_margin, label_range, require_classes, top_two
from patchproof.masking._memory import Measured, default_batch, out_of_memory
from patchproof.masking._objective import Aim, CleanAnswers, Objective, Views
from patchproof.settings import Engine

__all__ = [
    "AUTOCAST",
    "COPYING",
    "SHARES",
    "Aim",
    "Answers",
    "Audit",
    "CleanAnswers",
    "Copies",
    "Drift",
    "Engine",
    "Ensemble",
    "Evaluator",
    "MaskedForward",
    "Measured",
    "Mirror",
    "Network",
    "Objective",
    "Redone",
    "Views",
    "as_images",
    "assembled",
    "check_classifier",
    "default_batch",
    "evaluating",
    "fill_colour",
    "images_ahead",
    "label_margin",
    "label_range",
    "margin_changes",
    "masks_for",
    "network",
    "occlude",
    "out_of_memory",
    "require_classes",
    "require_images",
    "show",
    "tf32",
    "top_two",
    "weight_names",
]
