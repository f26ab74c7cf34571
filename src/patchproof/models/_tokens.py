"""Dropped tokens: a vision transformer is given only the tokens of an image that are not entirely hidden."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from patchproof.types import InputError, Size

SMALLEST_GROUP = 32
"""Smaller groups join the images with more visible tokens: one larger pass is faster than two small ones."""


def token_size(module: Any) -> Size:
    """Height and width of a token in pixels. Networks whose tokens cannot be dropped are refused."""
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import VisionTransformer

    if type(module) is not VisionTransformer or type(module.patch_embed) is not PatchEmbed:
        name = type(module).__name__
        if hasattr(module, "patch_embed"):
            name += f" with {type(module.patch_embed).__name__}"
        raise InputError(f"drop_tokens needs one of timm's plain vision transformers (vit_…, deit_…), not {name}")
    height, width = module.patch_embed.patch_size
    return int(height), int(width)


def token_pass(
    vit: Any, tokens: Float[Tensor, "b t d"], seen: Bool[Tensor, "b 1 1 t"] | None = None
) -> Float[Tensor, "b classes"]:
    """Logits from embedded tokens; no token attends to one that is not `seen`. A network may have a compiled one."""
    if seen is None:
        tokens = vit.blocks(tokens)
    else:
        for block in vit.blocks:
            tokens = block(tokens, attn_mask=seen)
    return vit.forward_head(vit.norm(tokens))


def masked_tokens(
    vit: Any, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]
) -> Float[Tensor, "b classes"]:
    """Logits from the visible tokens alone: those entirely hidden are dropped after they got their position.

    Images with the same number of visible tokens share a pass; small groups are padded to a larger number. A token that
    is hidden in part keeps what `images` shows of it. If all of an image is hidden its first token stays, since a head
    may need one.
    """
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    visible = functional.max_pool2d(keep.to(images.dtype), vit.patch_embed.patch_size).flatten(1) > 0
    visible[:, 0] |= ~visible.any(dim=1)
    visible = functional.pad(visible, (tokens.shape[1] - visible.shape[1], 0), value=True)  # class, register tokens
    visible_first = visible.byte().argsort(dim=1, descending=True, stable=True)
    counts = visible.sum(dim=1)
    fewest_first = counts.argsort(stable=True)
    lengths, sizes = torch.stack(counts.unique(return_counts=True)).tolist()
    # A head that pools counts every token that it is given, so its groups are not joined.
    least = SMALLEST_GROUP if vit.global_pool == "token" and vit.attn_pool is None else 1
    passed: Any = getattr(vit, "token_pass", partial(token_pass, vit))
    logits = []
    begin, end, shortest = 0, 0, lengths[0]
    for longest, size in zip(lengths, sizes, strict=True):
        if begin == end:
            shortest = longest
        end += size
        if end - begin < least and end < len(images):
            continue
        rows = fewest_first[begin:end]  # a slice: looking for the rows would wait for the device
        shown = tokens[rows[:, None], visible_first[rows, :longest]]
        seen = None
        if shortest < longest:
            seen = (torch.arange(longest, device=images.device) < counts[rows, None])[:, None, None]
        logits.append(passed(shown, seen))
        begin = end
    return torch.cat(logits)[fewest_first.argsort()]
