"""White-box patch attacks: an upper bound on robust accuracy, to hold against the certified lower one."""

from patchproof.attacks.base import Attack, Attacked, Patched, Target, Undefended, check_patched, image_generator
from patchproof.attacks.gradient import AttackPlan, GradientAttack
from patchproof.attacks.losses import FakeUnanimity, Misclassify, Objective, WrongMajority
from patchproof.attacks.suite import attack_in_turn, defended_attacks, undefended_attacks

__all__ = [
    "Attack",
    "AttackPlan",
    "Attacked",
    "FakeUnanimity",
    "GradientAttack",
    "Misclassify",
    "Objective",
    "Patched",
    "Target",
    "Undefended",
    "WrongMajority",
    "attack_in_turn",
    "check_patched",
    "defended_attacks",
    "image_generator",
    "undefended_attacks",
]
