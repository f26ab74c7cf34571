"""Training on masked copies: strategies that choose the masks, and a loop (`training.loop`) that learns from them."""

from patchproof.training.gradcam import grad_cam
from patchproof.training.plan import Plan, paper_learning_rate
from patchproof.training.strategies import STRATEGIES, MaskingStrategy, masking_strategy, training_masks

__all__ = [
    "STRATEGIES",
    "MaskingStrategy",
    "Plan",
    "grad_cam",
    "masking_strategy",
    "paper_learning_rate",
    "training_masks",
]
