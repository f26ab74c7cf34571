"""What a strategy remembers, the same on every process: after a step, what one process changed holds for all."""

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
    """A copy of what the strategy remembers, on the CPU; empty for one without memory.

    Whatever a checkpoint could not give back exactly is refused: tensors inside other values, keys that are not text.
    """
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
    """`before` with the changes that each process made: element by element in tensors, key by key in mappings.

    Float tensors may grow by rows, which are NaN where a process knows nothing. A step gives every image to one
    process, so changes about images never collide; where they do, the processes must agree.
    """
    if all(isinstance(value, Mapping) for value in after):
        old = before if isinstance(before, Mapping) else {}
        found = {}
        for key in dict.fromkeys(key for value in after for key in value):
            # A key that a process lacks though it was there before has been removed by it.
            having = [value[key] for value in after if key in value]
            if key not in old or len(having) == len(after):
                found[key] = merged(old.get(key), having, name=f"{name}.{key}")
        return found
    before, after = _grown(before, after)
    if all(isinstance(value, Tensor) for value in [before, *after]) and len({v.shape for v in [before, *after]}) == 1:
        result, touched = before.clone(), torch.zeros_like(before, dtype=torch.bool)
        for value in after:
            changed = ~_same(value, before)
            _require_agreement(name, bool(_same(value, result)[changed & touched].all()))
            result[changed], touched = value[changed], touched | changed
        return result
    new = [value for value in after if not _equal(value, before)]
    _require_agreement(name, all(_equal(value, new[0]) for value in new))
    return new[0] if new else before


def _grown(before: Any, after: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """All of them with as many rows as the longest, if they are float tensors that have grown."""
    if not all(isinstance(v, Tensor) and v.is_floating_point() and v.ndim for v in [before, *after]):
        return before, after
    rows = max(map(len, after))
    if min(map(len, after)) < len(before) or rows == len(before):
        return before, after
    longer = [torch.cat([v, v.new_full((rows - len(v), *v.shape[1:]), torch.nan)]) for v in [before, *after]]
    return longer[0], longer[1:]


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Element by element; NaN is the same as NaN."""
    return (one == other) | ((one != one) & (other != other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(_same(one, other).all())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _require_agreement(name: str, agreed: bool) -> None:
    if not agreed:
        raise CheckError(
            f"two processes changed the strategy's {name} in different ways; keep what it remembers per image "
            "(tensors by image position, or mappings by it), so that each entry is changed by one process"
        )
