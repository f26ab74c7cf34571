"""White-box patch attacks: an upper bound on robust accuracy, to compare with the certified lower one."""

from patchproof.attacks.base import Attack, Attacked, Patched, Target, Undefended, check_patched, image_generator
from patchproof.attacks.gradient import AttackPlan, GradientAttack, Misclassify
from patchproof.attacks.suite import NoiseAttack, attack_in_turn, defended_attacks, undefended_attacks

__all__ = [
    "Attack",
    "AttackPlan",
    "Attacked",
    "GradientAttack",
    "Misclassify",
    "NoiseAttack",
    "Patched",
    "Target",
    "Undefended",
    "attack_in_turn",
    "check_patched",
    "defended_attacks",
    "image_generator",
    "undefended_attacks",
]
