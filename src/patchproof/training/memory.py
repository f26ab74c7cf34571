"""The memory of a strategy: copied for checkpoints, and merged over processes after every step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from patchproof.types import CheckError, InputError

State = dict[str, Any]
"""Tensors and JSON values by name."""


def state_of(strategy: Any) -> State:
    """Return a copy of the strategy's memory on the CPU; it is empty if the strategy has none.

    A memory that a checkpoint could not restore exactly is refused: without `load_state_dict`, with tensors inside
    other values, or with keys that are not text.
    """
    if hasattr(strategy, "state_dict") and not hasattr(strategy, "load_state_dict"):
        raise InputError(
            "the strategy has state_dict() but no load_state_dict(state), without which a training cannot be resumed; "
            "add it, or remove state_dict()"
        )
    found: State = {}
    for name, value in strategy.state_dict().items() if hasattr(strategy, "state_dict") else ():
        if isinstance(value, Tensor):
            found[name] = value.detach().cpu().clone()
            continue
        try:
            found[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"the strategy's state {name!r} must be a tensor or plain JSON: {error}") from error
        if found[name] != value:
            raise InputError(f"the strategy's state {name!r} changes when saved as JSON; use text as keys, and lists")
    return found


def merged(before: Any, after: Sequence[Any], *, name: str = "state") -> Any:
    """Return `before` with the changes of every process: element by element in tensors, key by key in mappings.

    Float tensors may grow by rows; rows that a process lacks count as NaN. Each step gives every image to one process,
    so changes about images never collide. Processes that change the same entry must agree.
    """
    if all(isinstance(value, Mapping) for value in after):
        old = before if isinstance(before, Mapping) else {}
        found = {}
        for key in dict.fromkeys(key for value in after for key in value):
            having = [value[key] for value in after if key in value]
            removed = key in old and len(having) < len(after)
            if not removed:
                found[key] = merged(old.get(key), having, name=f"{name}.{key}")
        return found
    agreed = True
    if isinstance(before, Tensor) and all(isinstance(value, Tensor) for value in after):
        every = before, *after
        if all(v.is_floating_point() and v.ndim and len(v) >= len(before) for v in every):
            rows = max(map(len, every))
            missing = [v.new_full((rows - len(v), *v.shape[1:]), torch.nan) for v in every]
            before, *after = map(torch.cat, zip(every, missing, strict=True))
        if all(value.shape == before.shape for value in after):
            result, touched = before.clone(), torch.zeros_like(before, dtype=torch.bool)
            for value in after:
                changed = ~_same(value, before)
                agreed &= bool(_same(value, result)[changed & touched].all())
                result[changed], touched = value[changed], touched | changed
            after = [result]
    new = [value for value in after if not _equal(value, before)]
    if not agreed or not all(_equal(value, new[0]) for value in new):
        raise CheckError(
            f"two processes changed the strategy's {name} in different ways; keep what it remembers per image "
            "(tensors by image position, or mappings by it), so that each entry is changed by one process"
        )
    return new[0] if new else before


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Element-wise equality, where NaN equals NaN."""
    return (one == other) | ((one != one) & (other != other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(_same(one, other).all())
    return type(one) is type(other) and one == other
