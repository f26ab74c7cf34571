"""A fast copy of a network in another float type: faster than autocast, and as exact as that type allows.

docs/decisions/0010-fast-copy.md explains it, with measurements. Convolutions are scaled by what batch normalisation
divides by, whose own numbers stay in float32; a compiled copy folds it into the convolution instead. Rounding keeps the
sum of every convolution kernel. The last layer stays in float32, as does any layer that the cast would harm.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Fingerprint = tuple[tuple[int, int], ...]
Structure = tuple[tuple[int, str, int], ...]

CONVOLUTIONS = {"Conv2d", "Conv2dSame"}
NORMALISATIONS = {"BatchNorm2d", "BatchNormAct2d"}
"""Names of the types that are scaled or folded; a subclass of them may compute something else."""

INEXACT = 1e-3
"""Largest difference between a copy and its original, as a share of the largest output."""

NEGLIGIBLE = 2.0**-10
"""Rows of a weight that are smaller than this share of its median row may lose their value."""


@dataclass
class Twin:
    """The fast copy `network` of an original; None if the original cannot be converted.

    It follows the original's tensors. Writes to them are noticed, except those through `.data`, which are taken over
    once `seen` is None. A replaced module makes a new twin. A plain attribute that changes later goes unnoticed.
    """

    network: nn.Module | None
    structure: Structure
    scaled: list[tuple[str, str]] = field(default_factory=list)
    """Names of convolutions and of the batch normalisations that alone take their output."""
    folded: bool = False
    """True if these convolutions do the work of the batch normalisations, except the shift."""
    mine: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    """The copy's modules by the names they have in the original."""
    seen: Fingerprint | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        input_shape: tuple[int, int, int],
        compiled: bool,
        fold: bool = True,
    ) -> Twin:
        """Copy `module`; every step that must not change its function is checked in float32 on random images."""
        no_tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.inference_mode(False), torch.no_grad(), no_tf32:
            device = next((t.device for part in _parts(module) for t in _own(part)), torch.device("cpu"))
            images = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(0)).to(device)
            try:
                network = copy.deepcopy(module).eval().requires_grad_(False).to(memory_format=torch.channels_last)
                pairs, last, expected = _trace(network, images)
                twin = cls(network, structure_of(module), mine=dict(network.named_modules()))

                def unchanged() -> bool:
                    return bool((network(images) - expected).abs().amax() <= INEXACT * expected.abs().amax())

                def scalable(some: list[tuple[str, str]]) -> bool:
                    twin.scaled = some
                    twin.follow(module, trial=torch.Generator().manual_seed(0))
                    return unchanged()

                twin.scaled = pairs if scalable(pairs) else [pair for pair in pairs if scalable([pair])]
                twin.folded = fold and compiled and dtype != torch.float32
                if twin.folded:
                    for convolution, normalisation in twin.scaled:
                        twin.mine[normalisation] = Shift(twin.mine[normalisation])
                        network.set_submodule(normalisation, twin.mine[normalisation])
                        twin.mine[convolution].register_parameter("bias", None)
                twin.follow(module)
                if twin.folded and not unchanged():  # e.g. a normalisation that has two names or a hook
                    return cls.of(module, dtype, input_shape=input_shape, compiled=compiled, fold=False)
                _convert(network, dtype, twin.mine[last] if last else None)
                twin.follow(module)
                network(images.to(dtype))
                hide: Any = getattr(network, "masked", None)
                if hide is not None:
                    hide(images.to(dtype), torch.ones_like(images[:, :1], dtype=torch.bool))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, AssertionError, ValueError, AttributeError, LookupError):
                return cls(None, structure_of(module))  # e.g. the network has float32 constants
        if compiled:
            network.compile(dynamic=False)
            if hide is not None:
                network.masked = torch.compile(hide, dynamic=False)  # type: ignore[assignment, arg-type]
        return twin

    def following(self, module: nn.Module) -> nn.Module | None:
        """Return the copy with the weights that `module` has now."""
        if self.network is not None:
            now = fingerprint(module)
            if now != self.seen:
                with torch.inference_mode(False), torch.no_grad():
                    self.follow(module)
                self.seen = now
        return self.network

    def follow(self, module: nn.Module, trial: torch.Generator | None = None) -> None:
        """Take over the weights of `module`. With `trial`, scale convolutions at random, which must change nothing."""
        originals: dict[str, Any] = dict(module.named_modules())
        values = {name: _own(part) for name, part in originals.items()} | self._rescaled(originals, trial)
        copies: list[tuple[Tensor, Tensor]] = []
        kernels: dict[tuple[int, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, part in self.mine.items():
            for mine, value in zip(_own(part), values[name], strict=True):
                taps = value.shape[2:].numel() if isinstance(part, nn.Conv2d) and value.ndim == 4 else 1
                target = copies if taps == 1 else kernels.setdefault((taps, mine.dtype), [])
                target.append((mine, value))
        # All kernels of one size are rounded together, which is faster: a training step waits for this.
        for (taps, dtype), some in kernels.items():
            flat = rounded(torch.cat([value.reshape(-1, 1, 1, taps) for _, value in some]), dtype)
            parts = flat.split([value.shape[0] * value.shape[1] for _, value in some])
            copies += [(mine, part.view(mine.shape)) for (mine, _), part in zip(some, parts, strict=True)]
        for mine, value in copies:
            if mine.device != value.device:
                mine.data = mine.data.to(value.device)
        torch._foreach_copy_([mine for mine, _ in copies], [value for _, value in copies])

    def _rescaled(self, originals: dict[str, Any], trial: torch.Generator | None) -> dict[str, list[Tensor]]:
        """Tensors of the scaled convolutions and their normalisations, by module; computed for all channels at once."""
        if not self.scaled:
            return {}
        pairs = [(originals[convolution], originals[normalisation]) for convolution, normalisation in self.scaled]
        sizes = [bn.num_features for _, bn in pairs]
        mean = torch.cat([bn.running_mean for _, bn in pairs])
        variance = torch.cat([bn.running_var for _, bn in pairs])
        epsilon = torch.tensor([bn.eps for _, bn in pairs]).repeat_interleave(torch.tensor(sizes)).to(variance)
        if self.folded:
            gain = torch.cat([torch.ones_like(bn.running_var) if bn.weight is None else bn.weight for _, bn in pairs])
            scale = gain * (variance + epsilon).rsqrt()
        elif trial is None:
            scale = torch.exp2(-((variance + epsilon).log2() / 2).round())  # powers of two: exact
        else:
            scale = torch.exp2(torch.randint(-3, 4, variance.shape, generator=trial).to(variance))
        factors, means = scale.split(sizes), (mean * scale).split(sizes)
        variances = ((variance + epsilon) * scale.square() - epsilon).split(sizes)
        weights = torch._foreach_mul([conv.weight for conv, _ in pairs], [f[:, None, None, None] for f in factors])
        found: dict[str, list[Tensor]] = {}
        for number, (conv, bn) in enumerate(pairs):
            convolution, normalisation = self.scaled[number]
            bias = None if conv.bias is None else conv.bias * factors[number]
            if self.folded:
                shift = -means[number] if bn.bias is None else bn.bias - means[number]
                found[convolution] = [weights[number]]
                found[normalisation] = [shift if bias is None else bias + shift]
            else:
                changed = {
                    id(conv.weight): weights[number],
                    id(conv.bias): bias,
                    id(bn.running_mean): means[number],
                    id(bn.running_var): variances[number],
                }
                found[convolution] = [changed.get(id(tensor), tensor) for tensor in _own(conv)]
                found[normalisation] = [changed.get(id(tensor), tensor) for tensor in _own(bn)]
        return found


class Shift(nn.Module):
    """The rest of a folded batch normalisation: its shift in float32, and the activation that timm's have inside."""

    shift: Tensor

    def __init__(self, normalisation: Any) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros_like(normalisation.running_mean))
        self.activation = getattr(normalisation, "act", None)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.float() + self.shift[:, None, None]
        return (shifted if self.activation is None else self.activation(shifted)).to(x.dtype)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight so that every spatial kernel keeps its sum: its smallest tap absorbs the rounding of the others.

    Neighbouring pixels are alike, so the sum of a kernel's rounding errors is what reaches the output. For the
    depthwise convolutions of EfficientNet-lite0 this leaves an eighth of the error.
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
    """Run the network once to find what feeds what.

    Returned are the convolutions whose output goes into a batch normalisation, if each is called once; the name of the
    linear layer that makes the network's output, or ""; and that output.
    """
    made: dict[int, tuple[str, Tensor, int]] = {}  # keys are ids of the tensors, so these are kept alive
    calls: list[str] = []
    pairs: list[tuple[str, str]] = []
    handles = []
    for name, part in network.named_modules():
        kind = type(part).__name__

        def before(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            source, _tensor, version = made.get(id(inputs[0]) if inputs else 0, ("", None, 0))
            intact = source and inputs[0]._version == version  # not written to in between
            if intact and type(network.get_submodule(source)).__name__ in CONVOLUTIONS:
                pairs.append((source, name))

        def after(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            calls.append(name)
            made[id(output)] = name, output, getattr(output, "_version", 0)

        if kind in NORMALISATIONS and getattr(part, "running_mean", None) is not None:
            handles.append(part.register_forward_pre_hook(before))
        if kind in CONVOLUTIONS | NORMALISATIONS or isinstance(part, nn.Linear):
            handles.append(part.register_forward_hook(after))
    try:
        output = network(images)
    finally:
        for handle in handles:
            handle.remove()
    once = [pair for pair in pairs if all(calls.count(name) == 1 for name in pair)]
    last = made[id(output)][0] if id(output) in made else ""
    return once, last if calls.count(last) == 1 else "", output


def _convert(network: nn.Module, dtype: torch.dtype, last: nn.Module | None) -> None:
    """Cast everything except batch normalisations, the last layer, and layers that the cast would harm."""

    def upwards(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def downwards(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.to(dtype)  # fails for a layer that returns something else, which is then not converted

    in_float32 = {id(part) for shift in network.modules() if isinstance(shift, Shift) for part in shift.modules()}
    for part in list(network.modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or id(part) in in_float32:
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
    """True if a row overflows, or loses more than the rounding of numbers of ordinary size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(1, -1)
    size = rows.norm(dim=1)
    error = (rows.to(dtype).to(rows.dtype) - rows).norm(dim=1)
    fine = (error <= torch.finfo(dtype).eps * size) | (size < NEGLIGIBLE * size.median())
    return not bool(fine.all())


def _own(part: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]


def structure_of(module: nn.Module) -> Structure:
    return tuple((id(part), type(part).__name__, len(_own(part))) for part in _parts(module))


def _parts(module: nn.Module) -> list[nn.Module]:
    """List what `modules()` yields, in a third of the time: it is called before every group of passes."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def fingerprint(module: nn.Module) -> Fingerprint:
    """A value that changes whenever a weight is replaced or written to, unless it is through `.data`."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for part in _parts(module) for t in _own(part))
