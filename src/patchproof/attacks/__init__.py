"""White-box patch attacks: an upper bound on robust accuracy, to compare with the certified lower one."""

from patchproof.attacks.base import Attack as Attack
from patchproof.attacks.base import Attacked as Attacked
from patchproof.attacks.base import Patched as Patched
from patchproof.attacks.base import Undefended as Undefended
from patchproof.attacks.base import attack_in_turn as attack_in_turn
from patchproof.attacks.base import image_generator as image_generator
from patchproof.attacks.gradient import GradientAttack as GradientAttack
from patchproof.attacks.gradient import Misclassify as Misclassify
from patchproof.attacks.gradient import OnStep as OnStep
from patchproof.attacks.gradient import defended_attacks as defended_attacks
from patchproof.attacks.gradient import undefended_attacks as undefended_attacks
from patchproof.settings import AttackPlan as AttackPlan
