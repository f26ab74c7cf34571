"""A network's copy in another float type: faster than autocast, with the weights that the network has."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Fingerprint = tuple[tuple[int, int], ...]
Structure = tuple[tuple[int, str], ...]


@dataclass
class Twin:
    """`network` is None where the original cannot be converted.

    It follows the original's tensors: those written to are seen by themselves, whatever else was done to them (`.data`)
    once `seen` is None. Replaced modules make a new twin. Only a plain attribute changed later goes unnoticed.
    """

    network: nn.Module | None
    structure: Structure
    seen: Fingerprint | None = field(default=None, repr=False)

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype, *, input_shape: tuple[int, int, int], compiled: bool) -> Twin:
        with torch.inference_mode(False):
            network = copy.deepcopy(module).eval().requires_grad_(False)
            network = network.to(dtype).to(memory_format=torch.channels_last)
        if not _works(network, dtype, input_shape):
            return cls(None, _structure(module))
        if compiled:
            network.compile(dynamic=False)
            if hasattr(network, "masked"):
                network.masked = torch.compile(network.masked, dynamic=False)  # type: ignore[assignment, arg-type]
        return cls(network, _structure(module), fingerprint(module))

    def resembles(self, module: nn.Module) -> bool:
        """Is it still a copy of this network, but for its weights?"""
        return self.structure == _structure(module)

    def following(self, module: nn.Module) -> nn.Module | None:
        """The twin, with the weights that `module` has now."""
        if self.network is None:
            return None
        now = fingerprint(module)
        if now != self.seen:
            mine, theirs = _tensors(self.network), _tensors(module)
            with torch.inference_mode(False), torch.no_grad():
                for tensor, original in zip(mine, theirs, strict=True):
                    if tensor.device != original.device:
                        tensor.data = tensor.data.to(original.device)
                torch._foreach_copy_(mine, theirs)
            self.seen = now
        return self.network


def _works(network: nn.Module, dtype: torch.dtype, input_shape: tuple[int, int, int]) -> bool:
    """Some networks hold float32 constants of their own, and fail in any other type."""
    device = next((t.device for t in _tensors(network)), torch.device("cpu"))
    try:
        with torch.inference_mode():
            images = torch.zeros(1, *input_shape, dtype=dtype, device=device)
            network(images)
            if hasattr(network, "masked"):
                network.masked(images, torch.ones_like(images[:, :1], dtype=torch.bool))  # type: ignore[operator]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AssertionError, ValueError):
        return False
    return True


def _structure(module: nn.Module) -> Structure:
    return tuple((id(part), type(part).__name__) for part in _parts(module))


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers; one shared by several modules as often as it is shared."""
    held = [t for part in _parts(module) for t in (*part._parameters.values(), *part._buffers.values())]
    return [tensor for tensor in held if tensor is not None]


def _parts(module: nn.Module) -> list[nn.Module]:
    """What `modules()` yields, in a third of the time: this is asked before every group of passes."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def fingerprint(module: nn.Module) -> Fingerprint:
    """Changes whenever a weight is written to or replaced, as optimisers and load_state_dict do; not with `.data`."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in _tensors(module))
