"""F(x ⊙ m): the only place where a classifier sees a masked image, with gradients or without.

Certification, prediction, the training search, attacks and the explorer all evaluate masked copies through one
`Evaluator`, in chunks of (image × mask): memory depends on the chunk, not on the batch or the number of masks.
"""

from patchproof.masking._arithmetic import AUTOCAST as AUTOCAST
from patchproof.masking._arithmetic import evaluating as evaluating
from patchproof.masking._arithmetic import network as network
from patchproof.masking._arithmetic import tf32 as tf32
from patchproof.masking._checks import Drift as Drift
from patchproof.masking._checks import check_classifier as check_classifier
from patchproof.masking._checks import margin_changes as margin_changes
from patchproof.masking._checks import require_two as require_two
from patchproof.masking._ensemble import Ensemble as Ensemble
from patchproof.masking._ensemble import Mirror as Mirror
from patchproof.masking._ensemble import assembled as assembled
from patchproof.masking._ensemble import weight_names as weight_names
from patchproof.masking._evaluator import Copies as Copies
from patchproof.masking._evaluator import Evaluator as Evaluator
from patchproof.masking._images import COPYING as COPYING
from patchproof.masking._images import MaskedForward as MaskedForward
from patchproof.masking._images import as_images as as_images
from patchproof.masking._images import explained as explained
from patchproof.masking._images import fill_colour as fill_colour
from patchproof.masking._images import images_ahead as images_ahead
from patchproof.masking._images import masks_for as masks_for
from patchproof.masking._images import occlude as occlude
from patchproof.masking._images import require_batch as require_batch
from patchproof.masking._images import require_images as require_images
from patchproof.masking._images import show as show
from patchproof.masking._labels import Audit as Audit
from patchproof.masking._labels import Measured as Measured
from patchproof.masking._labels import Redone as Redone
from patchproof.masking._labels import label_margin as label_margin
from patchproof.masking._labels import label_range as label_range
from patchproof.masking._labels import require_classes as require_classes
from patchproof.masking._labels import require_labels as require_labels
from patchproof.masking._labels import top_two as top_two
from patchproof.masking._memory import default_batch as default_batch
from patchproof.masking._memory import free_memory as free_memory
from patchproof.masking._memory import out_of_memory as out_of_memory
from patchproof.masking._objective import Aim as Aim
from patchproof.masking._objective import CleanAnswers as CleanAnswers
from patchproof.masking._objective import Objective as Objective
from patchproof.masking._objective import Views as Views
from patchproof.settings import Engine as Engine
