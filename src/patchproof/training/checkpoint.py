"""Checkpoints of a training run: everything that the next step depends on, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from patchproof.models import ImageClassifier, file_sha256, is_whole, save_checkpoint, sealed, settled, write_state
from patchproof.training.loop import Trainer
from patchproof.training.memory import state_of
from patchproof.types import CheckError

STATE, TENSORS = "training.json", "training.safetensors"
SCHEMA = 1


def save_training(
    folder: Path, trainer: Trainer, shipped: ImageClassifier, notes: Mapping[str, Any], *, history: Any = None
) -> None:
    """Replace `folder` by the trainer's state and the classifier to ship; if killed, the old or the new one remains.

    `notes` is plain JSON that a resumed run gets back; `history` becomes the classifier's own account of its training.
    Weights that are NaN or infinite never replace good ones.
    """
    if not all(torch.isfinite(v).all() for v in trainer.weights().values() if v.is_floating_point()):
        raise CheckError(
            f"the weights are NaN or infinite after step {trainer.step}; a checkpoint saved before is kept: lower the "
            "learning rate"
        )
    remembered, scaler = state_of(trainer.strategy), trainer.accelerator.scaler
    tensors = {
        **{f"model/{name}": value for name, value in trainer.classifier.state_dict().items()},
        **{f"average/{name}": value for name, value in (trainer.average or {}).items()},
        **{f"strategy/{name}": value for name, value in remembered.items() if isinstance(value, Tensor)},
    }
    for name, parameter in _trained(trainer).items():
        for key, value in trainer.optimizer.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)

    def write(place: Path) -> None:
        write_state(tensors, place / TENSORS)
        state = {
            "schema": SCHEMA,
            "step": trainer.step,
            "sha256": file_sha256(place / TENSORS),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "strategy": {name: value for name, value in remembered.items() if not isinstance(value, Tensor)},
            "notes": dict(notes),
        }
        (place / STATE).write_text(json.dumps(sealed(state), indent=2) + "\n", encoding="utf-8")

    save_checkpoint(shipped, folder, extra=history, write_more=write)


def load_training(folder: Path, trainer: Trainer) -> Mapping[str, Any] | None:
    """Restore the trainer from the last checkpoint and return the notes saved with it; None if there is none."""
    place = settled(folder)
    if not place.exists():
        return None
    try:
        state = json.loads((place / STATE).read_text("utf-8"))
        if state["schema"] != SCHEMA:
            raise ValueError(f"schema {state['schema']}, this is {SCHEMA}")
        if not is_whole(state):
            raise ValueError(f"{STATE} was changed since it was written")
        if file_sha256(place / TENSORS) != state["sha256"]:
            raise ValueError("its tensors are damaged")
        tensors = safetensors.torch.load_file(place / TENSORS)

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        trainer.classifier.load_state_dict(under("model/"))
        for name, parameter in _trained(trainer).items():
            found = under(f"optimizer/{name}/")
            restored = {k: v.to("cpu" if k == "step" else parameter.device) for k, v in found.items()}
            trainer.optimizer.optimizer.state[parameter] = restored
        if trainer.average is not None:
            for name, value in under("average/").items():
                trainer.average[name].copy_(value)
        if state["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(state["scaler"])
        remembered = under("strategy/") | state["strategy"]
        trainer.step = int(state["step"])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckError(
            f"the checkpoint {place} is damaged ({error}); remove it to begin again, or start a new run from the "
            "weights of checkpoint-best, if there is one"
        ) from error
    if remembered:
        trainer.strategy.load_state_dict(remembered)  # type: ignore[attr-defined]  # its errors are its own
    return state["notes"]


def _trained(trainer: Trainer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in trainer.classifier.named_parameters() if p.requires_grad}
