"""Certified defences behind one protocol: `predict` and `certify`."""

from patchproof.defenses.base import Assessment, Certificates, Defense
from patchproof.defenses.patchcleanser import PatchCleanser, double_masking

__all__ = ["Assessment", "Certificates", "Defense", "PatchCleanser", "double_masking"]
