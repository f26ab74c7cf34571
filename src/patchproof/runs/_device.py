"""The device that a process computes on."""

from __future__ import annotations

import re

import torch

from patchproof.runs.executors import local_rank
from patchproof.types import InputError


def choose_device(name: str) -> torch.device:
    """The device of this name, if the machine has it; under a launcher, each process's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    rank = local_rank()
    if name == "cuda" and rank is not None and counts["cuda"]:
        name = f"cuda:{rank % counts['cuda']}"
    kind, _, index = name.partition(":")
    if kind not in counts or not re.fullmatch(r"\w+(:\d+)?", name):
        raise InputError(f"device must be cpu, cuda, cuda:1, mps or auto, not `{name}`")
    if int(index or 0) >= counts[kind]:
        raise InputError(f"device={name}: this machine has {counts[kind]} {kind.upper()} devices; try cpu")
    return torch.device(name)
