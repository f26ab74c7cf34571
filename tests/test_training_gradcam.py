"""Grad-CAM against captum for convolutional networks, ConvNeXt, ViT and Swin, and that it leaves no state."""

from __future__ import annotations

import gc

import pytest
import torch
from captum.attr import LayerGradCam
from torch import nn

from patchproof.models import load_classifier, rewrap
from patchproof.training.gradcam import grad_cam, named_layer, salient_layer
from patchproof.types import InputError

NETWORKS = [
    ("small", None),
    ("resnet10t", None),
    ("convnext_atto", (64, 64)),
    ("vit_tiny_patch16_224", (64, 64)),
    ("swin_tiny_patch4_window7_224", (64, 64)),
]


@pytest.fixture(scope="module", params=NETWORKS, ids=[name for name, _ in NETWORKS])
def case(request):
    name, size = request.param
    classifier = load_classifier(name, "random", num_classes=5, input_size=size, seed=3)
    height, width = classifier.input_size
    images = torch.rand(4, 3, min(height, 64), min(width, 64), generator=torch.Generator().manual_seed(0))
    return classifier, images, torch.tensor([0, 4, 2, 2])


def captum_map(classifier, layer, images, labels):
    """captum's own map; tokens are turned into channels first, since captum takes axis 1 for the channels."""
    if hasattr(layer, "weight") and getattr(classifier.module, "patch_embed", None) is not None:
        height, width = classifier.module.patch_embed.grid_size

        def to_grid(tensor):
            if tensor.ndim == 4:  # Swin keeps the grid, and has its channels last
                return tensor.permute(0, 3, 1, 2)
            return tensor[:, -height * width :].transpose(1, 2).unflatten(2, (height, width))

        captured = {}

        def hook(_m, _i, output):
            captured["a"] = output

        handle = layer.register_forward_hook(hook)
        logits = classifier(images)
        handle.remove()
        gradient = torch.autograd.grad(logits.gather(1, labels[:, None]).sum(), captured["a"])[0]
        a, g = to_grid(captured["a"]), to_grid(gradient)
        return (g.mean(dim=(2, 3), keepdim=True) * a).sum(dim=1, keepdim=True).relu()
    return LayerGradCam(classifier, layer).attribute(images, target=labels, relu_attributions=True)


def test_the_map_equals_captums_per_image_and_leaves_no_state(case):
    classifier, images, labels = case
    layer = salient_layer(classifier, images[:1])
    expected = captum_map(classifier, layer, images, labels).detach()
    expected = nn.functional.interpolate(expected, size=images.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    found = grad_cam(classifier, images, labels)
    assert found.shape == (4, *images.shape[2:])
    assert expected.amax() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.amax()))
    alone = torch.cat([grad_cam(classifier, images[row : row + 1], labels[row : row + 1]) for row in range(4)])
    torch.testing.assert_close(alone, found, rtol=1e-3, atol=1e-6)
    assert not any(m._forward_hooks or m._backward_hooks for m in classifier.modules())
    assert all(p.grad is None for p in classifier.parameters())
    assert torch.is_grad_enabled()
    gc.collect()
    assert not [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.grad_fn is not None]


class Shared(nn.Module):
    """A layer that runs twice, one that never runs, one that gives a pair, and tokens without a grid."""

    def __init__(self):
        super().__init__()
        self.conv, self.idle = nn.Conv2d(3, 3, 3, padding=1), nn.Identity()
        self.pair = nn.MaxPool2d(2, return_indices=True)
        self.tokens, self.head = nn.Flatten(2), nn.Linear(3, 2)

    def forward(self, images):
        return self.head(self.tokens(self.pair(self.conv(self.conv(images)))[0]).mean(dim=2))


@pytest.mark.parametrize("name", ["conv", "idle", "pair", "tokens", "head", ""])
def test_layers_without_one_map_are_refused(name):
    model = Shared().eval()
    with pytest.raises(InputError, match="needs a layer that runs once per pass and gives a feature map"):
        grad_cam(model, torch.rand(2, 3, 8, 8), layer=named_layer(model, name))
    assert not any(m._forward_hooks for m in model.modules())


def test_the_map_of_a_vit_that_drops_tokens_has_all_tokens(generator):
    plain = load_classifier("vit_tiny_patch16_224", "random", num_classes=3, input_size=(64, 64))
    images, keep = torch.rand(2, 3, 64, 64, generator=generator), torch.ones(2, 1, 64, 64, dtype=torch.bool)
    keep[0, :, :16], keep[1, :, 32:] = False, False  # different numbers of tokens
    found = grad_cam(rewrap(plain, drop_tokens=True), images, keep=keep)
    assert torch.equal(found, grad_cam(plain, images, keep=keep))


@pytest.mark.parametrize("name", [None, "mixer_s32_224", pytest.param("xcit_nano_12_p16_224", marks=pytest.mark.slow)])
def test_a_network_whose_evidence_lies_in_no_feature_map_is_refused(name):
    """One without any map, and networks that go on with tokens after their last one."""
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 2)).eval()
    classifier = flat if name is None else load_classifier(name, "random", num_classes=3)
    with pytest.raises(InputError, match=f"{name or 'Sequential'} has no feature map that .* pass `layer`"):
        grad_cam(classifier, torch.zeros(1, 3, 224, 224), torch.zeros(1, dtype=torch.int64))


class Reads(nn.Module):
    """Convolutions, then a head that reads the map as a row of positions."""

    def __init__(self):
        super().__init__()
        self.num_features = 16  # as many as the map has rows: no reason to take those for channels
        self.body, self.flat, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Flatten(2), nn.Linear(64, 3)

    def forward(self, images):
        return self.last(self.flat(self.body(images).relu()).mean(dim=2))


def test_a_map_that_a_head_flattens_is_still_the_map():
    model, images = Reads().eval(), torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2])
    assert salient_layer(model, images[:1]) is model.body
    expected = LayerGradCam(model, model.body).attribute(images, target=labels, relu_attributions=True)[:, 0].detach()
    torch.testing.assert_close(grad_cam(model, images, labels), expected, rtol=1e-4, atol=1e-7)


def test_an_attention_pool_does_not_hide_the_map_before_it():
    classifier = load_classifier("resnet50_clip", "random", num_classes=3, input_size=(64, 64))
    layer = salient_layer(classifier, torch.zeros(1, 3, 64, 64))
    assert layer is classifier.module.final_conv
