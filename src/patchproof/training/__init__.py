"""Training on masked copies: strategies that choose the masks, and a loop (`training.loop`) that learns from them."""

from patchproof.training.gradcam import grad_cam as grad_cam
from patchproof.training.plan import Plan as Plan
from patchproof.training.plan import paper_learning_rate as paper_learning_rate
from patchproof.training.strategies import STRATEGIES as STRATEGIES
from patchproof.training.strategies import MaskingStrategy as MaskingStrategy
from patchproof.training.strategies import masking_strategy as masking_strategy
from patchproof.training.strategies import training_masks as training_masks
