"""Training on masked copies: strategies that choose the masks, and a loop that learns from them."""

from patchproof.training.loop import EpochReport, Schedule, fit
from patchproof.training.strategies import STRATEGIES, MaskingStrategy, masking_strategy, training_masks

__all__ = ["STRATEGIES", "EpochReport", "MaskingStrategy", "Schedule", "fit", "masking_strategy", "training_masks"]
