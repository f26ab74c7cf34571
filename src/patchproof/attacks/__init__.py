"""White-box patch attacks: an upper bound on robust accuracy, to compare with the certified lower one."""

from patchproof.attacks.base import Attack, Attacked, Patched, Undefended, attack_in_turn, image_generator
from patchproof.attacks.gradient import AttackPlan, GradientAttack, Misclassify, defended_attacks, undefended_attacks

__all__ = [
    "Attack",
    "AttackPlan",
    "Attacked",
    "GradientAttack",
    "Misclassify",
    "Patched",
    "Undefended",
    "attack_in_turn",
    "defended_attacks",
    "image_generator",
    "undefended_attacks",
]
