"""A network's copy in another float type: faster than autocast, and as close to the network as that type allows.

What makes it close, with measurements, is in docs/decisions/0010-fast-copy.md: batch normalisation is folded into the
convolution before it, so that no statistic is ever cast; rounding keeps the sum of every convolution kernel; the last
layer, and any that the cast would harm, stay in float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Fingerprint = tuple[tuple[int, int], ...]
Structure = tuple[tuple[int, str], ...]

FOLDED = {"Conv2d", "Conv2dSame"}, {"BatchNorm2d", "BatchNormAct2d"}
"""Types by name: a subclass may compute something else."""

INEXACT = 1e-3
"""A folded network that differs by more than this share of its largest output computed something else."""

NEGLIGIBLE = 2.0**-10
"""Rows of a weight smaller than this share of its median row may lose their value."""


EPSILON = 1e-5
"""Batch normalisation takes none that is smaller."""


class Shift(nn.Module):
    """What is left of a folded batch normalisation: a bias per channel, in float32, and the activation."""

    bias: Tensor
    zero: Tensor
    one: Tensor
    variance: Tensor

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__()
        for name, value in (("bias", 0.0), ("zero", 0.0), ("one", 1.0), ("variance", 1.0 - EPSILON)):
            self.register_buffer(name, torch.full((channels,), value))
        self.act = act

    def forward(self, features: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # becomes part of the next kernel
            return self.act((features + self.bias[:, None, None]).to(features.dtype))
        # Without the compiler, batch normalisation adds a bias faster than a sum or the convolution itself does.
        return self.act(functional.batch_norm(features, self.zero, self.variance, self.one, self.bias, eps=EPSILON))


@dataclass
class Twin:
    """`network` is None where the original cannot be converted.

    It follows the original's tensors: those written to are seen by themselves, whatever else was done to them (`.data`)
    once `seen` is None. Replaced modules make a new twin. Only a plain attribute changed later goes unnoticed.
    """

    network: nn.Module | None
    structure: Structure
    folds: list[tuple[str, str]] = field(default_factory=list)
    """Names of convolutions and of the batch normalisations folded into them."""
    mine: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    seen: Fingerprint | None = field(default=None, repr=False)

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype, *, input_shape: tuple[int, int, int], compiled: bool) -> Twin:
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # to see whether folding is
        with torch.inference_mode(False), torch.no_grad(), exact:
            twin = cls._made(module, dtype, input_shape)
        if twin.network is not None and compiled:
            twin.network.compile(dynamic=False)
            if hasattr(twin.network, "masked"):
                twin.network.masked = torch.compile(twin.network.masked, dynamic=False)  # type: ignore[assignment, arg-type]
        return twin

    @classmethod
    def _made(cls, module: nn.Module, dtype: torch.dtype, input_shape: tuple[int, int, int]) -> Twin:
        device = next((t.device for t in _tensors(module)), torch.device("cpu"))
        images = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(0)).to(device)
        plain = copy.deepcopy(module).eval().requires_grad_(False).to(memory_format=torch.channels_last)
        try:
            folds, last, expected = _trace(plain, images)
            for some in (folds, []) if folds else ([],):
                network = copy.deepcopy(plain)
                twin = cls(network, _structure(module), some, dict(network.named_modules()))
                twin._fold()
                twin.follow(module)
                if not some or _close(network(images), expected):
                    break
            _convert(network, dtype, twin.mine[last] if last else None)
            twin.follow(module)
            network(images.to(dtype))
            if hasattr(network, "masked"):
                network.masked(images.to(dtype), torch.ones_like(images[:, :1], dtype=torch.bool))  # type: ignore[operator]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AssertionError, ValueError):  # e.g. float32 constants of its own
            return cls(None, _structure(module))
        return twin

    def _fold(self) -> None:
        """Replace batch normalisations by what is left of them."""
        for convolution, normalisation in self.folds:
            conv: Any = self.mine[convolution]
            bn: Any = self.mine[normalisation]
            conv.bias = None
            shift = Shift(bn.num_features, getattr(bn, "act", nn.Identity())).to(bn.running_mean.device)
            parent, _, name = normalisation.rpartition(".")
            setattr(self.mine[parent], name, shift)
            self.mine[normalisation] = shift

    def resembles(self, module: nn.Module) -> bool:
        """Is it still a copy of this network, but for its weights?"""
        return self.structure == _structure(module)

    def following(self, module: nn.Module) -> nn.Module | None:
        """The twin, with the weights that `module` has now."""
        if self.network is not None and fingerprint(module) != self.seen:
            with torch.inference_mode(False), torch.no_grad():
                self.follow(module)
        return self.network

    def follow(self, module: nn.Module) -> None:
        """Take over the weights of `module`."""
        theirs: dict[str, Any] = dict(module.named_modules())
        folded = {name for pair in self.folds for name in pair}
        wanted: list[tuple[Tensor, Tensor]] = []
        for convolution, normalisation in self.folds:
            conv, bn = theirs[convolution], theirs[normalisation]
            scale = (bn.running_var + bn.eps).rsqrt() * (1.0 if bn.weight is None else bn.weight)
            bias = -bn.running_mean if conv.bias is None else conv.bias - bn.running_mean
            bias = bias * scale + (0.0 if bn.bias is None else bn.bias)
            kernel: Any = self.mine[convolution].weight
            wanted.append((kernel, rounded(conv.weight * scale[:, None, None, None], kernel.dtype)))
            wanted.append((self.mine[normalisation].bias, bias))  # type: ignore[arg-type]
        for name, part in self.mine.items():
            if name in folded:
                continue
            for mine, original in zip(_own(part), _own(theirs[name]), strict=True):
                kernel = isinstance(part, nn.Conv2d) and original.ndim == 4
                wanted.append((mine, rounded(original, mine.dtype) if kernel else original))
        for mine, original in wanted:
            if mine.device != original.device:
                mine.data = mine.data.to(original.device)
        torch._foreach_copy_([mine for mine, _ in wanted], [original for _, original in wanted])
        self.seen = fingerprint(module)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast such that every spatial kernel keeps its sum: the smallest tap takes up what rounding the others lost.

    Neighbouring pixels are alike, so the sum of a kernel's rounding errors is what reaches the output: for the
    depthwise convolutions of EfficientNet-lite0, whose kernels have few taps, this leaves a tenth of the error.
    """
    if dtype == weight.dtype or weight[0, 0].numel() == 1:
        return weight
    taps = weight.flatten(2)
    cast = taps.to(dtype)
    lost = taps - cast.to(taps.dtype)
    smallest = taps.abs().argmin(dim=2, keepdim=True)
    others = lost.sum(dim=2, keepdim=True) - lost.gather(2, smallest)
    return cast.scatter(2, smallest, (taps.gather(2, smallest) + others).to(dtype)).view(weight.shape)


def _trace(network: nn.Module, images: Tensor) -> tuple[list[tuple[str, str]], str, Tensor]:
    """Convolutions whose output goes into a batch normalisation, each called once; the linear layer whose output is the
    network's, or nothing; and that output."""
    made: dict[int, tuple[str, Tensor]] = {}  # holds on to the tensors, whose ids are the keys
    calls: list[str] = []
    folds: list[tuple[str, str]] = []
    handles = []
    for name, part in network.named_modules():
        kind = type(part).__name__

        def before(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            source = made.get(id(inputs[0])) if inputs else None
            if source is not None and type(network.get_submodule(source[0])).__name__ in FOLDED[0]:
                folds.append((source[0], name))

        def after(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            calls.append(name)
            made[id(output)] = name, output

        if kind in FOLDED[1] and getattr(part, "running_mean", None) is not None:
            handles.append(part.register_forward_pre_hook(before))
        if kind in FOLDED[0] | FOLDED[1] or isinstance(part, nn.Linear):
            handles.append(part.register_forward_hook(after))
    try:
        output = network(images)
    finally:
        for handle in handles:
            handle.remove()
    once = [pair for pair in folds if all(calls.count(name) == 1 for name in pair)]
    last = made[id(output)][0] if id(output) in made else ""
    return once, last if calls.count(last) == 1 else "", output


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().amax() <= INEXACT * expected.abs().amax())


def _convert(network: nn.Module, dtype: torch.dtype, last: nn.Module | None) -> None:
    """Cast everything but batch normalisations, the last layer and leaves that would lose their value."""

    def upwards(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def downwards(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.to(dtype)

    for part in list(network.modules()):
        if isinstance(part, (nn.modules.batchnorm._BatchNorm, Shift)):
            continue
        harmed = not any(part.children()) and any(_harmed(tensor, dtype) for tensor in _own(part))
        if part is last or harmed:
            part.register_forward_pre_hook(upwards)
            if part is not last:
                part.register_forward_hook(downwards)
            continue
        for tensor in _own(part):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _harmed(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Does some row overflow, or lose more than rounding takes from a number of ordinary size?"""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
    size = rows.norm(dim=1)
    error = (rows.to(dtype).to(rows.dtype) - rows).norm(dim=1)
    fine = (error <= torch.finfo(dtype).eps * size) | (size < NEGLIGIBLE * size.median())
    return not bool(fine.all())


def _own(part: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]


def _structure(module: nn.Module) -> Structure:
    return tuple((id(part), type(part).__name__) for part in _parts(module))


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers; one shared by several modules as often as it is shared."""
    return [tensor for part in _parts(module) for tensor in _own(part)]


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
