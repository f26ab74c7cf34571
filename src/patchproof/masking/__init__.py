"""F(x ⊙ m): the only place where a classifier sees a masked image.

Certification, inference and the training search all evaluate masked copies through a `Runner`, in chunks of
(image × mask), so memory depends on the chunk and neither on the batch nor on the number of masks.
"""

from patchproof.masking._arithmetic import AUTOCAST, Pass, evaluating, forward, passing, tf32
from patchproof.masking._images import as_images, fill_colour, images_ahead, occlude
from patchproof.masking._logits import label_margin, label_range, require_classes, top_two
from patchproof.masking._runner import PARTS, Audit, Copies, Engine, InChunks, Runner, out_of_memory, padded
from patchproof.masking._table import BLOCK, TwoMaskTable, clean_labels, two_mask_labels

__all__ = [
    "AUTOCAST",
    "BLOCK",
    "PARTS",
    "Audit",
    "Copies",
    "Engine",
    "InChunks",
    "Pass",
    "Runner",
    "TwoMaskTable",
    "as_images",
    "clean_labels",
    "evaluating",
    "fill_colour",
    "forward",
    "images_ahead",
    "label_margin",
    "label_range",
    "occlude",
    "out_of_memory",
    "padded",
    "passing",
    "require_classes",
    "tf32",
    "top_two",
    "two_mask_labels",
]
