"""Grad-CAM (Selvaraju et al. 2017): where in an image the evidence for a label lies."""

from __future__ import annotations

import difflib
import math
import re
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.masking import fill_colour, occlude, show
from patchproof.settings import Upsampling
from patchproof.types import Classifier, InputError, Size

POOLING = re.compile(r"(^|\.)(head|global_pool|attn_pool)(\.|$)")
NO_MAP = "Grad-CAM needs a layer that runs once per pass and gives a feature map or a ViT's tokens; name another"
_SALIENT_LAYERS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def grad_cam(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"] | None = None,
    *,
    keep: Bool[Tensor, "b 1 h w"] | None = None,
    layer: nn.Module | None = None,
    upsampling: Upsampling = "bilinear",
) -> Float[Tensor, "b h w"]:
    """Return relu(Σ_c ᾱ_c A_c), where ᾱ_c is the mean of ∂logit_y/∂A_c over positions, enlarged to the image.

    With `keep`, the map is that of x ⊙ m. y is the label, or without labels the predicted class. A is the output of
    `layer`; by default the last feature map of a convolutional network, or the normalised tokens that enter the last
    block of a ViT (after that block only the class token matters).
    """
    if not isinstance(classifier, nn.Module):
        raise InputError("Grad-CAM looks inside the classifier, so it must be an nn.Module")
    if keep is not None and getattr(classifier, "token_size", None) is not None:  # a map must have all tokens
        images, keep = occlude(images, keep, fill_colour(classifier, images)), None
    captured: list[Tensor] = []

    def begin_graph(_module: nn.Module, _inputs: object, output: Any) -> Tensor:
        if captured or not isinstance(output, Tensor):
            raise InputError(NO_MAP)
        captured.append(output.detach().requires_grad_())
        torch.set_grad_enabled(True)  # until the no_grad block below ends; earlier layers need no graph
        return captured[-1].clone()  # a copy, since the next module may work in place

    handle = (layer or salient_layer(classifier, images[:1])).register_forward_hook(begin_graph)
    try:
        with torch.no_grad():
            logits = show(classifier, images, keep)
            if not captured:
                raise InputError(NO_MAP)
            (activations,) = captured
            aim = logits.argmax(dim=1) if labels is None else labels
            (gradients,) = torch.autograd.grad(logits.gather(1, aim[:, None]).sum(), activations)
    finally:
        handle.remove()
    size = (int(images.shape[2]), int(images.shape[3]))
    activations, gradients = (_as_grid(classifier, v.float(), size) for v in (activations.detach(), gradients))
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    salience = (weights * activations).sum(dim=1, keepdim=True).relu()
    corners = None if upsampling == "nearest" else False
    return functional.interpolate(salience, size=size, mode=upsampling, align_corners=corners)[:, 0]


def named_layer(classifier: Any, name: str) -> nn.Module:
    """Return the network's layer of this name."""
    network = getattr(classifier, "module", classifier)
    try:
        return network.get_submodule(name)
    except AttributeError as error:
        known = [part for part, _ in network.named_modules() if part]
        maps = [part for part, module in network.named_modules() if isinstance(module, nn.Conv2d)]
        near = difflib.get_close_matches(name, known, n=1) or maps[-1:] or known[-1:]
        raise InputError(f"the network has no layer `{name}`; e.g. `{near[0]}`") from error


def salient_layer(classifier: nn.Module, probe: Float[Tensor, "1 c h w"]) -> nn.Module:
    """Return the default layer for Grad-CAM; it is found once by a pass with `probe`, and then remembered.

    Without a ViT's tokens, it is the last module that returns a map of more than one position, unless tokens are
    computed after it. Tokens in the head do not count, because a head may flatten the map in order to pool it.
    """
    for module in classifier.modules():  # a ViT knows the grid of its tokens
        grid = getattr(getattr(module, "patch_embed", None), "grid_size", None)
        if grid is not None and hasattr(getattr(module, "blocks", [None])[-1], "norm1"):
            return module.blocks[-1].norm1  # type: ignore[index, return-value, union-attr]
    if classifier in _SALIENT_LAYERS:
        return classifier.get_submodule(_SALIENT_LAYERS[classifier])
    seen: list[str] = []

    def note(name: str, module: nn.Module, _inputs: object, output: object) -> None:
        shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else ()
        if len(shape) == 3 and math.prod(shape) > max(shape[0], shape[2]):  # channels may come first or last
            seen.append(name)
        elif len(shape) == 2 and shape[0] > 1 and not (POOLING.search(name) or isinstance(module, nn.Flatten)):
            seen.clear()

    named = [(name, module) for name, module in classifier.named_modules() if name]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in named]
    try:
        with torch.no_grad():
            classifier(probe)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        name = getattr(classifier, "architecture", type(classifier).__name__)
        raise InputError(f"{name} has no feature map that Grad-CAM could look at; pass `layer`, or train without it")
    _SALIENT_LAYERS[classifier] = seen[-1]
    return classifier.get_submodule(seen[-1])


def _as_grid(classifier: nn.Module, values: Tensor, size: Size) -> Float[Tensor, "b c gh gw"]:
    """Return feature maps with channels first, or tokens (without class tokens) laid out on their grid.

    Swin and others have channels last. The two axes whose aspect ratio is closer to the image's are the positions.
    """

    def distortion(height: int, width: int) -> float:
        return abs(math.log(height * size[1] / (width * size[0])))

    if values.ndim == 4:
        one, two, three = values.shape[1:]
        return values.permute(0, 3, 1, 2) if distortion(one, two) < distortion(two, three) else values
    embeddings: Any = (m.patch_embed for m in classifier.modules() if hasattr(m, "patch_embed"))
    height, width = next((e.grid_size for e in embeddings), (math.inf, 1))
    if values.ndim != 3 or values.shape[1] < height * width:
        raise InputError(NO_MAP)
    return values[:, -height * width :].transpose(1, 2).unflatten(2, (height, width))
