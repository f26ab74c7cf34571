"""White-box patch attacks: an upper bound on robust accuracy, to compare with the certified lower one."""

from patchproof.attacks.base import Attack, Attacked, Patched, Undefended, attack_in_turn, image_generator
from patchproof.attacks.gradient import GradientAttack, Misclassify, OnStep, defended_attacks, undefended_attacks
from patchproof.settings import AttackPlan

__all__ = [
    "Attack",
    "AttackPlan",
    "Attacked",
    "GradientAttack",
    "Misclassify",
    "OnStep",
    "Patched",
    "Undefended",
    "attack_in_turn",
    "defended_attacks",
    "image_generator",
    "undefended_attacks",
]
