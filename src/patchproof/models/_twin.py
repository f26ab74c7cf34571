"""A network's copy in another float type: faster than autocast, and as close to the network as that type allows.

What makes it close, with measurements, is in docs/decisions/0010-fast-copy.md: convolutions are scaled to what batch
normalisation divides by, whose own numbers stay in float32, or where the copy is compiled take it in altogether;
rounding keeps the sum of every convolution kernel; the last layer, and any that the cast would harm, stay in float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patchproof.models._tokens import TokenPass

Fingerprint = tuple[tuple[int, int], ...]
Structure = tuple[tuple[int, str, int], ...]

SCALED = {"Conv2d", "Conv2dSame"}, {"BatchNorm2d", "BatchNormAct2d"}
"""Types by name: a subclass may compute something else."""

INEXACT = 1e-3
"""A copy that differs by more than this share of its largest output computes something else."""

NEGLIGIBLE = 2.0**-10
"""Rows of a weight smaller than this share of its median row may lose their value."""


@dataclass
class Twin:
    """`network` is None where the original cannot be converted.

    It follows the original's tensors: those written to are seen by themselves, whatever else was done to them (`.data`)
    once `seen` is None. Replaced modules make a new twin. Only a plain attribute changed later goes unnoticed.
    """

    network: nn.Module | None
    structure: Structure
    scaled: list[tuple[str, str]] = field(default_factory=list)
    """Names of convolutions and of the batch normalisations that take their output, and nothing else does."""
    folded: bool = False
    """Whether these convolutions do what the batch normalisations did, but for the shift."""
    mine: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    token_pass: TokenPass | None = field(default=None, repr=False)
    """The compiled pass over the visible tokens, of a transformer that drops the others."""
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
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # to see whether scaling is
        with torch.inference_mode(False), torch.no_grad(), exact:
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
                    for _, name in twin.scaled:
                        twin.mine[name] = Shift(twin.mine[name])
                        network.set_submodule(name, twin.mine[name])
                    for name, _ in twin.scaled:
                        twin.mine[name].register_parameter("bias", None)
                twin.follow(module)
                if twin.folded and not unchanged():  # a normalisation with two names, or a hook of its own
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
                return cls(None, structure_of(module))  # e.g. float32 constants of its own
        if compiled:
            network.compile(dynamic=False)
            if hide is not None:
                network.masked = torch.compile(hide, dynamic=False)  # type: ignore[assignment, arg-type]
        return twin

    def following(self, module: nn.Module) -> nn.Module | None:
        """The twin, with the weights that `module` has now."""
        if self.network is not None and (now := fingerprint(module)) != self.seen:
            with torch.inference_mode(False), torch.no_grad():
                self.follow(module)
            self.seen = now
        return self.network

    def follow(self, module: nn.Module, trial: torch.Generator | None = None) -> None:
        """Take over the weights of `module`; on `trial`, scale convolutions at random, which must change nothing."""
        theirs: dict[str, Any] = dict(module.named_modules())
        values = {name: _own(part) for name, part in theirs.items()} | self._moved(theirs, trial)
        wanted: list[tuple[Tensor, Tensor]] = []
        kernels: dict[tuple[int, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, part in self.mine.items():
            for mine, value in zip(_own(part), values[name], strict=True):
                taps = value.shape[2:].numel() if isinstance(part, nn.Conv2d) and value.ndim == 4 else 1
                if taps > 1:
                    kernels.setdefault((taps, mine.dtype), []).append((mine, value))
                else:
                    wanted.append((mine, value))
        # Kernels of one size are rounded together: a training step waits for this, and each is a few numbers.
        for (taps, dtype), some in kernels.items():
            flat = rounded(torch.cat([value.reshape(-1, 1, 1, taps) for _, value in some]), dtype)
            parts = flat.split([value.shape[0] * value.shape[1] for _, value in some])
            wanted += [(mine, part.view(mine.shape)) for (mine, _), part in zip(some, parts, strict=True)]
        for mine, original in wanted:
            if mine.device != original.device:
                mine.data = mine.data.to(original.device)
        torch._foreach_copy_([mine for mine, _ in wanted], [original for _, original in wanted])

    def _moved(self, theirs: dict[str, Any], trial: torch.Generator | None) -> dict[str, list[Tensor]]:
        """The tensors of scaled or folded convolutions and their normalisations, by module."""
        if not self.scaled:
            return {}
        pairs = [(theirs[convolution], theirs[normalisation]) for convolution, normalisation in self.scaled]
        sizes = [bn.num_features for _, bn in pairs]
        mean, variance = (torch.cat([getattr(bn, name) for _, bn in pairs]) for name in ("running_mean", "running_var"))
        epsilon = torch.tensor([bn.eps for _, bn in pairs]).repeat_interleave(torch.tensor(sizes)).to(variance)
        if self.folded:
            gain = torch.cat([torch.ones_like(bn.running_var) if bn.weight is None else bn.weight for _, bn in pairs])
            scale = gain * (variance + epsilon).rsqrt()
        elif trial is None:
            scale = torch.exp2(-((variance + epsilon).log2() / 2).round())  # powers of two: exact
        else:
            scale = torch.exp2(torch.randint(-3, 4, variance.shape, generator=trial).to(variance))
        means, variances = (mean * scale).split(sizes), ((variance + epsilon) * scale.square() - epsilon).split(sizes)
        factors = scale.split(sizes)
        weights = torch._foreach_mul([conv.weight for conv, _ in pairs], [f[:, None, None, None] for f in factors])
        found: dict[str, list[Tensor]] = {}
        rows = zip(self.scaled, pairs, weights, factors, means, variances, strict=True)
        for (convolution, normalisation), (conv, bn), weight, factor, moved_mean, moved_variance in rows:
            bias = [] if conv.bias is None else [conv.bias * factor]
            if self.folded:
                found[convolution] = [weight]
                found[normalisation] = [sum(bias, -moved_mean) if bn.bias is None else sum(bias, bn.bias - moved_mean)]
            else:
                moved = {id(bn.running_mean): moved_mean, id(bn.running_var): moved_variance, id(conv.weight): weight}
                moved |= {id(conv.bias): value for value in bias}
                found[convolution] = [moved.get(id(tensor), tensor) for tensor in _own(conv)]
                found[normalisation] = [moved.get(id(tensor), tensor) for tensor in _own(bn)]
        return found


class Shift(nn.Module):
    """What is left of a batch normalisation once the convolution before it does the rest: a shift in float32, and the
    activation that timm's have within."""

    shift: Tensor

    def __init__(self, normalisation: Any) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros_like(normalisation.running_mean))
        self.activation = getattr(normalisation, "act", None)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.float() + self.shift[:, None, None]
        return (shifted if self.activation is None else self.activation(shifted)).to(x.dtype)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast such that every spatial kernel keeps its sum: the smallest tap takes up what rounding the others lost.

    Neighbouring pixels are alike, so the sum of a kernel's rounding errors is what reaches the output: for the
    depthwise convolutions of EfficientNet-lite0, whose kernels have few taps, this leaves an eighth of the error.
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
    made: dict[int, tuple[str, Tensor, int]] = {}  # holds on to the tensors, whose ids are the keys
    calls: list[str] = []
    pairs: list[tuple[str, str]] = []
    handles = []
    for name, part in network.named_modules():
        kind = type(part).__name__

        def before(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            source, _tensor, version = made.get(id(inputs[0]) if inputs else 0, ("", None, 0))
            written = source and inputs[0]._version != version  # in place, on the way
            if source and not written and type(network.get_submodule(source)).__name__ in SCALED[0]:
                pairs.append((source, name))

        def after(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            calls.append(name)
            made[id(output)] = name, output, getattr(output, "_version", 0)

        if kind in SCALED[1] and getattr(part, "running_mean", None) is not None:
            handles.append(part.register_forward_pre_hook(before))
        if kind in SCALED[0] | SCALED[1] or isinstance(part, nn.Linear):
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
    """Cast everything but batch normalisations, the last layer and leaves that would lose their value."""

    def upwards(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def downwards(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.to(dtype)  # a layer that returns something else is not converted: this fails

    exact = {id(part) for shift in network.modules() if isinstance(shift, Shift) for part in shift.modules()}
    for part in list(network.modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or id(part) in exact:
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
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for part in _parts(module) for t in _own(part))
