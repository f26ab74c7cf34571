"""A training run on disk: everything the next step depends on, replaced as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from patchproof.models import ImageClassifier, file_sha256, is_whole, save_checkpoint, sealed, settled, write_state
from patchproof.training.loop import Trainer
from patchproof.training.memory import state_of
from patchproof.types import CheckError

STATE, TENSORS = "training.json", "training.safetensors"
SCHEMA = 1


@dataclass(frozen=True)
class Resumed:
    """Where a run stands: the step it has finished, and what its caller noted down."""

    step: int
    notes: Mapping[str, Any]


def save_training(folder: Path, trainer: Trainer, shipped: ImageClassifier, notes: Mapping[str, Any]) -> None:
    """Replace `folder` by the trainer's present state beside the classifier to ship; a kill leaves the old or the new.

    `notes` is plain JSON that a resumed run gets back. Weights that are NaN or infinite never replace good ones.
    """
    if not all(torch.isfinite(v).all() for v in trainer.weights().values() if v.is_floating_point()):
        raise CheckError(
            f"the weights are NaN or infinite after step {trainer.step}; a checkpoint saved before is kept: lower the "
            "learning rate"
        )

    remembered = state_of(trainer.strategy)

    def write(place: Path) -> None:
        tensors = {f"strategy/{name}": value for name, value in remembered.items() if isinstance(value, Tensor)}
        write_state(_tensors(trainer) | tensors, place / TENSORS)
        scaler = trainer.accelerator.scaler
        state = {
            "schema": SCHEMA,
            "step": trainer.step,
            "sha256": file_sha256(place / TENSORS),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "strategy": {name: value for name, value in remembered.items() if not isinstance(value, Tensor)},
            "notes": dict(notes),
        }
        (place / STATE).write_text(json.dumps(sealed(state), indent=2) + "\n", encoding="utf-8")

    save_checkpoint(shipped, folder, write_more=write)


def load_training(folder: Path, trainer: Trainer) -> Resumed | None:
    """Put the trainer where the last checkpoint left it; None if there is none yet."""
    place = settled(folder)
    if not place.exists():
        return None
    try:
        return _restore(place, trainer)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckError(
            f"the checkpoint {place} is damaged ({error}); remove it to begin again, or start a new run from the "
            "weights of checkpoint-best"
        ) from error


def _restore(folder: Path, trainer: Trainer) -> Resumed:
    state = json.loads((folder / STATE).read_text("utf-8"))
    if state["schema"] != SCHEMA:
        raise ValueError(f"schema {state['schema']}, this is {SCHEMA}")
    if not is_whole(state):
        raise ValueError(f"{STATE} was changed since it was written")
    if file_sha256(folder / TENSORS) != state["sha256"]:
        raise ValueError("its tensors are damaged")
    tensors = safetensors.torch.load_file(folder / TENSORS)
    trainer.classifier.load_state_dict(_named(tensors, "model/"))
    _load_optimizer(trainer, _named(tensors, "optimizer/"))
    if trainer.average is not None:
        for name, value in _named(tensors, "average/").items():
            trainer.average[name].copy_(value)
    if state["scaler"] is not None and trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(state["scaler"])
    remembered = _named(tensors, "strategy/") | state.get("strategy", {})
    if remembered:
        trainer.strategy.load_state_dict(remembered)  # type: ignore[attr-defined]
    trainer.step = int(state["step"])
    return Resumed(trainer.step, state["notes"])


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    found = {f"model/{k}": v for k, v in trainer.classifier.state_dict().items()}
    found |= {f"average/{k}": v for k, v in (trainer.average or {}).items()}
    for name, parameter in _parameters(trainer).items():
        state = trainer.optimizer.optimizer.state.get(parameter, {})
        found |= {f"optimizer/{name}/{key}": _as_tensor(value) for key, value in state.items() if value is not None}
    return found


def _load_optimizer(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        owner, _, key = name.rpartition("/")
        states.setdefault(owner, {})[key] = value
    for name, parameter in _parameters(trainer).items():
        restored = {k: v.to("cpu" if k == "step" else parameter.device) for k, v in states.get(name, {}).items()}
        trainer.optimizer.optimizer.state[parameter] = restored


def _parameters(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in trainer.classifier.named_parameters() if p.requires_grad}


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
