"""Interval bounds (Gowal et al. 2018): how far margins can move while each pixel varies within an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import inside
from patchproof.models._classifier import ImageClassifier
from patchproof.types import InputError, Size

PASSABLE: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Conv2d: lambda layer: layer.padding_mode == "zeros",
    nn.BatchNorm1d: lambda layer: not layer.training and layer.running_mean is not None,
    nn.BatchNorm2d: lambda layer: not layer.training and layer.running_mean is not None,
    nn.Flatten: lambda layer: (layer.start_dim, layer.end_dim) == (1, -1),
    nn.AvgPool2d: lambda layer: layer.divisor_override is None,
    **dict.fromkeys((nn.Linear, nn.ReLU, nn.Identity), lambda layer: True),
}
"""Layers that bounds can pass, and the condition on each. The type must be exact: a subclass may compute anything."""


class Interval(NamedTuple):
    """All values within `radius` of `middle`."""

    middle: Tensor
    radius: Tensor

    @property
    def size(self) -> Float[Tensor, "b 1"]:
        """The largest absolute value in the interval, for each image."""
        return (self.middle.abs() + self.radius).flatten(1).amax(dim=1, keepdim=True)

    def widened(self, by: Float[Tensor, "b _"]) -> Interval:
        return Interval(self.middle, self.radius + by.view(*by.shape, *[1] * (self.radius.ndim - 2)))

    def passed(self, layer: nn.Module, *, rounding: bool, padding: Any = None) -> Interval:
        """The interval of the layer's outputs; a convolution pads by its own padding, or by this one. An
        ImageClassifier stands for its normalisation alone.

        For rounding: each output sums `terms` products, `norm` is their Σ|w| and `offset` the size of what is added.
        """
        if isinstance(layer, nn.Flatten):
            return Interval(self.middle.flatten(1), self.radius.flatten(1))
        terms, norm, offset = 1, self.middle.new_ones(1), self.middle.new_zeros(1)
        if isinstance(layer, nn.ReLU):
            lower, upper = (self.middle - self.radius).relu(), (self.middle + self.radius).relu()
            out = Interval((upper + lower) / 2, (upper - lower) / 2)
        elif isinstance(layer, nn.AvgPool2d):
            out = Interval(layer(self.middle), layer(self.radius))
            kernel = layer.kernel_size
            terms = kernel**2 if isinstance(kernel, int) else kernel[0] * kernel[1]
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            weight, bias = _weight_and_bias(layer, self.middle)
            affine: Any = functional.linear
            if isinstance(layer, nn.Conv2d):
                padding = layer.padding if padding is None else padding
                how = {"stride": layer.stride, "padding": padding, "dilation": layer.dilation, "groups": layer.groups}
                affine = partial(functional.conv2d, **how)  # type: ignore[arg-type]
            out = Interval(affine(self.middle, weight, bias), affine(self.radius, weight.abs()))
            terms, norm, offset = weight[0].numel(), weight.abs().flatten(1).sum(dim=1), bias.abs()
        else:  # a normalisation, (x − centre)·scale + shift
            norms, dtype = cast(Any, layer), self.middle.dtype
            if isinstance(layer, ImageClassifier):
                centre, scale = norms.mean.to(dtype), 1 / norms.std.to(dtype)
            else:
                centre, scale = norms.running_mean.to(dtype), (norms.running_var.to(dtype) + norms.eps).rsqrt()
            shift = torch.zeros_like(centre)
            if getattr(layer, "affine", False):
                scale, shift = scale * norms.weight.to(dtype), norms.bias.to(dtype)
            shape = -1, *[1] * (self.middle.ndim - 2)
            middle = (self.middle - centre.view(shape)) * scale.view(shape) + shift.view(shape)
            out = Interval(middle, self.radius * scale.abs().view(shape))
            norm, offset = scale.abs(), centre.abs() * scale.abs() + shift.abs()
        return out.widened(_gamma(terms, self.middle) * (norm * self.size + offset)) if rounding else out


@dataclass(frozen=True)
class Reached:
    """Intervals of feature maps while a patch varies: those of the clean image but in the part that the patch reaches.

    Part i belongs to the map of image `owner[i]` and begins at the row and column `corner[i]`. Cells outside a map are
    zero.
    """

    clean: Interval
    part: Interval
    owner: Int64[Tensor, " n"]
    corner: Int64[Tensor, "n 2"]

    def rectangle(self, corner: Int64[Tensor, "n 2"], size: Size) -> Interval:
        """The intervals of one rectangle of each map."""
        (height, width), (rows, columns) = self.clean.middle.shape[2:], self.part.middle.shape[2:]
        row = corner[:, 0, None, None] + torch.arange(size[0], device=corner.device)[:, None]
        column = corner[:, 1, None, None] + torch.arange(size[1], device=corner.device)
        own_row, own_column = row - self.corner[:, 0, None, None], column - self.corner[:, 1, None, None]
        # One table holds the cells of the clean maps, then those of the parts, then a zero.
        parts, number = len(self.clean.middle) * height * width, torch.arange(len(corner), device=corner.device)
        clean = (self.owner[:, None, None] * height + row) * width + column
        own = parts + (number[:, None, None] * rows + own_row) * columns + own_column
        reached = (own_row >= 0) & (own_row < rows) & (own_column >= 0) & (own_column < columns)
        outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
        cell = own.where(reached, clean).masked_fill(outside, parts + len(corner) * rows * columns)

        def gathered(*maps: Tensor) -> Tensor:
            cells = [values.permute(0, 2, 3, 1).flatten(0, 2) for values in maps]
            return functional.embedding(cell, functional.pad(torch.cat(cells), (0, 0, 0, 1))).permute(0, 3, 1, 2)

        return Interval(*map(gathered, self.clean, self.part))

    def whole(self) -> Interval:
        """The intervals of the whole maps."""
        height, width = self.clean.middle.shape[2:]
        return self.rectangle(torch.zeros_like(self.corner), (height, width))

    def passed(self, layer: nn.Module, *, rounding: bool) -> Reached | Interval:
        """The intervals of the layer's outputs, on whole maps if patches reach most cells or the layer needs them."""
        if isinstance(layer, nn.ReLU | nn.BatchNorm2d | ImageClassifier):
            clean, part = (x.passed(layer, rounding=rounding) for x in (self.clean, self.part))
            return replace(self, clean=clean, part=part)
        if not isinstance(layer, nn.Conv2d) or isinstance(layer.padding, str):
            return self.whole().passed(layer, rounding=rounding)
        # On each axis the output o sees the inputs o·stride − padding … + extent − 1.
        how = zip(layer.kernel_size, layer.dilation, layer.stride, layer.padding, strict=True)
        axes = [(dilation * (kernel - 1) + 1, stride, int(padding)) for kernel, dilation, stride, padding in how]
        some, every = self.part.middle.shape[2:], self.clean.middle.shape[2:]
        reached = [(n + extent - 2) // stride + 1 for n, (extent, stride, _) in zip(some, axes, strict=True)]
        outputs = [(n + 2 * pad - extent) // stride + 1 for n, (extent, stride, pad) in zip(every, axes, strict=True)]
        if 2 * math.prod(reached) > math.prod(outputs):
            return self.whole().passed(layer, rounding=rounding)
        height, width = [(n - 1) * stride + extent for n, (extent, stride, _) in zip(reached, axes, strict=True)]
        extent, stride, padding = self.corner.new_tensor(axes).T
        corner = -((extent - 1 - padding - self.corner) // stride)  # rounds up
        seen = self.rectangle(corner * stride - padding, (height, width))
        clean, part = self.clean.passed(layer, rounding=rounding), seen.passed(layer, rounding=rounding, padding=0)
        return Reached(clean, part, self.owner, corner)


def margin_bounds(
    classifier: nn.Module,
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " n"],
    owner: Int64[Tensor, " n"],
    windows: Int64[Tensor, "n 4"],
    *,
    share: float = 1.0,
    rounding: bool = True,
) -> Float[Tensor, "n classes"]:
    """Lower bounds of logit_y − logit_c while pixels in a window vary between 0 and 1, or by a share of the way there.

    Window i (top, left, height, width) lies in the image `owner[i]`; y is `labels[i]`. Feature maps are bounded once
    per image, and per window only where its pixels reach. A final linear layer is applied to the difference of its
    rows, which is tighter than bounding each logit.

    With `rounding`, the bounds hold for the network as computed in the dtype of `images`, not only in exact arithmetic:
    a sum of n products in any order is off by at most γ·Σ|w·x| with γ = n·u/(1 − n·u) (Higham 2002, §3.1). Every layer
    widens its interval by more than twice that, once for its own arithmetic and once for the network's. In float64 this
    adds about 1e-10. It does not cover TF32 or Winograd convolutions, which do not exist for float64.
    """
    corner, size = windows[:, :2], cast(Size, tuple(windows[:, 2:].amax(dim=0).tolist()))
    clean, nothing = _interval(images, images, rounding=rounding), images[:0, :, :0, :0]
    shown = Reached(clean, Interval(nothing, nothing), owner, corner).rectangle(corner, size).middle
    patch = inside(torch.cat([torch.zeros_like(corner), windows[:, 2:]], dim=1), size)
    lower, upper = (
        shown.lerp(end, share).where(patch, shown) for end in (torch.zeros_like(shown), torch.ones_like(shown))
    )
    layers = passable_layers(classifier)
    last: Any = layers.pop() if isinstance(layers[-1], nn.Linear) else None
    x: Reached | Interval = Reached(clean, _interval(lower, upper, rounding=rounding), owner, corner)
    for layer in layers:
        x = x.passed(layer, rounding=rounding)
    assert isinstance(x, Interval)  # Flatten has made the maps whole
    if last is None:
        weight = torch.eye(x.middle.shape[1]).to(x.middle)
        bias = torch.zeros_like(weight[0])
    else:
        weight, bias = _weight_and_bias(last, x.middle)
    difference = weight[labels][:, None] - weight
    bound = torch.einsum("bkn,bn->bk", difference, x.middle) + (bias[labels][:, None] - bias)
    bound = bound - torch.einsum("bkn,bn->bk", difference.abs(), x.radius)
    if rounding:
        each = weight.abs().sum(dim=1) * x.size + bias.abs()
        bound = bound - _gamma(weight.shape[1], x.middle) * (each + each.gather(1, labels[:, None]))
    return bound


def passable_layers(network: nn.Module) -> list[nn.Module]:
    """Return the layers of a sequential network in order; what bounds cannot pass is refused by name."""
    layers = list(_layers(network))
    flat = next((i for i, layer in enumerate(layers) if isinstance(layer, nn.Flatten)), len(layers))
    if linear := next((layer for layer in layers[:flat] if isinstance(layer, nn.Linear)), None):
        raise InputError(
            f"interval bounds cannot pass the layer {linear} before a Flatten, where it acts on the columns of "
            "feature maps; put a Flatten before it"
        )
    if flat == len(layers):
        raise InputError(
            f"interval bounds need one logit per class, but this {type(network).__name__} has no Flatten and returns "
            "feature maps; end it with Flatten, or with Flatten and Linear"
        )
    return layers


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    name = type(network).__name__
    if network._forward_hooks or network._forward_pre_hooks:
        raise InputError(f"interval bounds cannot see what the hooks of a {name} do; remove them")
    if "forward" in vars(network):
        raise InputError(f"interval bounds cannot see what a {name} with a `forward` of its own does; remove it")
    if type(network) is ImageClassifier:
        yield network  # its normalisation
        yield from _layers(network.module)
    elif isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        for part in network:
            yield from _layers(part)
    elif type(network) not in PASSABLE or not PASSABLE[type(network)](network):
        if isinstance(network, nn.modules.batchnorm._BatchNorm) and network.training:
            name += " in training mode"
        if type(network) in PASSABLE:
            name += f" ({network})"
        known = ", ".join(kind.__name__ for kind in PASSABLE)
        raise InputError(
            f"interval bounds cannot pass the layer {name}, only {known} and Sequential, as in the model `cnn_ibp`"
        )
    elif not isinstance(network, nn.Identity):
        yield network


def _interval(lower: Tensor, upper: Tensor, *, rounding: bool) -> Interval:
    x = Interval((upper + lower) / 2, (upper - lower) / 2)
    return x.widened(_gamma(1, lower) * x.size) if rounding else x


def _weight_and_bias(layer: nn.Conv2d | nn.Linear, like: Tensor) -> tuple[Tensor, Tensor]:
    weight = layer.weight.to(like.dtype)
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.to(like.dtype)


def _gamma(terms: int, like: Tensor) -> float:
    """More than twice the γ of a sum of `terms` products, with a few operations before and after it."""
    return 4 * (terms + 8) * torch.finfo(like.dtype).eps / 2
