"""Interval bounds (Gowal et al. 2018): how far margins can move while each pixel varies within an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.models._classifier import ImageClassifier
from patchproof.types import InputError

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


def margin_bounds(
    classifier: nn.Module,
    lower: Float[Tensor, "b c h w"],
    upper: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    rounding: bool = True,
) -> Float[Tensor, "b classes"]:
    """Lower bounds of logit_y − logit_c over all images between `lower` and `upper`.

    A final linear layer is applied to the difference of its rows, which is tighter than bounding each logit.

    With `rounding`, the bounds hold for the network as computed in the dtype of `lower`, not only in exact arithmetic:
    a sum of n products in any order is off by at most γ·Σ|w·x| with γ = n·u/(1 − n·u) (Higham 2002, §3.1). Every layer
    widens its interval by more than twice that, once for its own arithmetic and once for the network's. In float64 this
    adds about 1e-10. It does not cover TF32 or Winograd convolutions, which do not exist for float64.
    """
    layers = passable_layers(classifier)
    last: Any = layers.pop() if isinstance(layers[-1], nn.Linear) else None
    x = Interval((upper + lower) / 2, (upper - lower) / 2)
    if rounding:
        x = x.widened(_gamma(1, lower) * x.size)
    for layer in layers:
        x = _passed(layer, x, rounding=rounding)
    if last is None:
        weight = torch.eye(x.middle.shape[1]).to(x.middle)
        bias = torch.zeros_like(weight[0])
    else:
        weight, bias = _weight_and_bias(last, lower)
    difference = weight[labels][:, None] - weight
    bound = torch.einsum("bkn,bn->bk", difference, x.middle) + (bias[labels][:, None] - bias)
    bound = bound - torch.einsum("bkn,bn->bk", difference.abs(), x.radius)
    if rounding:
        each = weight.abs().sum(dim=1) * x.size + bias.abs()
        bound = bound - _gamma(weight.shape[1], lower) * (each + each.gather(1, labels[:, None]))
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
        yield Normalisation(network)
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


class Normalisation(nn.Module):
    """The step (x − mean) / std of a classifier, as a layer."""

    def __init__(self, classifier: ImageClassifier) -> None:
        super().__init__()
        self.mean, self.std = classifier.mean, classifier.std


def _passed(layer: nn.Module, x: Interval, *, rounding: bool) -> Interval:
    """Return the interval of the layer's outputs for inputs in `x`.

    For rounding: each output sums `terms` products, `norm` is their Σ|w| and `offset` the size of what is added.
    """
    if isinstance(layer, nn.Flatten):
        return Interval(x.middle.flatten(1), x.radius.flatten(1))
    terms, norm, offset = 1, x.middle.new_ones(1), x.middle.new_zeros(1)
    if isinstance(layer, nn.ReLU):
        lower, upper = (x.middle - x.radius).relu(), (x.middle + x.radius).relu()
        out = Interval((upper + lower) / 2, (upper - lower) / 2)
    elif isinstance(layer, nn.AvgPool2d):
        out = Interval(layer(x.middle), layer(x.radius))
        kernel = layer.kernel_size
        terms = kernel**2 if isinstance(kernel, int) else kernel[0] * kernel[1]
    elif isinstance(layer, nn.Conv2d | nn.Linear):
        weight, bias = _weight_and_bias(layer, x.middle)
        affine: Any = functional.linear
        if isinstance(layer, nn.Conv2d):
            how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
            affine = partial(functional.conv2d, **how)  # type: ignore[arg-type]
        out = Interval(affine(x.middle, weight, bias), affine(x.radius, weight.abs()))
        terms, norm, offset = weight[0].numel(), weight.abs().flatten(1).sum(dim=1), bias.abs()
    else:  # a normalisation, (x − centre)·scale + shift
        norms, dtype = cast(Any, layer), x.middle.dtype
        if isinstance(layer, Normalisation):
            centre, scale = norms.mean.to(dtype), 1 / norms.std.to(dtype)
        else:
            centre, scale = norms.running_mean.to(dtype), (norms.running_var.to(dtype) + norms.eps).rsqrt()
        shift = torch.zeros_like(centre)
        if getattr(layer, "affine", False):
            scale, shift = scale * norms.weight.to(dtype), norms.bias.to(dtype)
        shape = -1, *[1] * (x.middle.ndim - 2)
        middle = (x.middle - centre.view(shape)) * scale.view(shape) + shift.view(shape)
        out = Interval(middle, x.radius * scale.abs().view(shape))
        norm, offset = scale.abs(), centre.abs() * scale.abs() + shift.abs()
    return out.widened(_gamma(terms, x.middle) * (norm * x.size + offset)) if rounding else out


def _weight_and_bias(layer: nn.Conv2d | nn.Linear, like: Tensor) -> tuple[Tensor, Tensor]:
    weight = layer.weight.to(like.dtype)
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.to(like.dtype)


def _gamma(terms: int, like: Tensor) -> float:
    """More than twice the γ of a sum of `terms` products, with a few operations before and after it."""
    return 4 * (terms + 8) * torch.finfo(like.dtype).eps / 2
