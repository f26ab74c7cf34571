"""The package's own networks: receptive fields, hidden pixels that differ from black, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from patchproof.masking import show
from patchproof.models import (
    known_weights,
    load_checkpoint,
    load_classifier,
    replace_head,
    save_checkpoint,
    weights_sha256,
)
from patchproof.models._classifier import seeded
from patchproof.models._networks import BagNet, large_blocks
from patchproof.types import InputError


def images(count: int, side: int = 32, seed: int = 1) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def generic(network: BagNet) -> BagNet:
    """Set generic statistics and scales, in float64, so that every pixel that matters changes the output."""
    with seeded(0):
        for part in network.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.weight.data.uniform_(0.5, 1.5)
                part.bias.data.uniform_(0.5, 1.5)  # ReLUs mostly open
                part.running_mean.uniform_(-0.1, 0.1)
    return network.double().eval()


slow = pytest.mark.slow
STRIDED = [(8, 3, 2), (8, 1, 1), (12, 3, 2), (12, 3, 1)]


@pytest.mark.parametrize(
    ("blocks", "field", "side"),
    [
        *((f"bagnet{size}", (size, 1, -(size // 2)), 32) for size in (5, 17)),
        *(pytest.param(f"bagnet{size}", (size, 1, -(size // 2)), 32, marks=slow) for size in (7, 9, 11, 13)),
        (STRIDED, (17, 4, -8), 37),
        (large_blocks(17), (17, 8, -8), 40),
        (large_blocks(33), (33, 8, -16), 40),
    ],
)
def test_a_cell_sees_its_receptive_field_and_nothing_else(blocks, field, side):
    with seeded(0):
        network = generic(
            load_classifier(blocks, "random").module if isinstance(blocks, str) else BagNet(blocks=blocks)
        )
    assert network.receptive_field == field
    size, stride, offset = field
    image = images(1, side).double().requires_grad_()
    cells = network.local_logits(image)
    rows, columns = cells.shape[-2:]
    weights = images(1, 10)[0, 0, 0, :10].double()[None, :, None, None]
    for r, q in ((0, 0), (rows // 2, columns // 3), (rows - 1, columns - 1), (1, columns - 2)):
        (gradient,) = torch.autograd.grad((cells * weights)[0, :, r, q].sum(), image, retain_graph=True)
        top, left = offset + r * stride, offset + q * stride
        inside = torch.zeros(side, side, dtype=torch.bool)
        inside[max(0, top) : top + size, max(0, left) : left + size] = True
        assert torch.equal((gradient != 0).any(dim=1)[0], inside)
        changed = torch.where(inside, image.detach(), images(1, side, seed=2).double())
        assert torch.equal(network.local_logits(changed)[..., r, q], cells[..., r, q])
    torch.testing.assert_close(network(image), cells.mean(dim=(2, 3)))


def test_hidden_pixels_differ_from_black_and_their_values_do_not_matter():
    classifier = load_classifier("resnet18_ablated", "random", seed=1)
    x = images(2)
    keep = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    keep[..., 5:9] = True
    with torch.inference_mode():
        seen = show(classifier, x, keep)
        assert torch.equal(seen, show(classifier, torch.where(keep, x, images(2, seed=3)), keep))
        assert torch.equal(seen, classifier.masked(torch.where(keep, x, torch.nan), keep))
        assert not torch.allclose(seen, classifier(x * keep))
        torch.testing.assert_close(classifier.masked(x, torch.ones_like(keep)), classifier(x))
        stacked = torch.cat([x, 1 - x], dim=1) * keep
        torch.testing.assert_close(seen, super(type(classifier.module), classifier.module).forward(stacked))


@pytest.mark.parametrize("name", ["resnet18_32", "resnet18_ablated", "vit_patch4_32", "cnn_ibp", "bagnet5"])
def test_own_networks_are_saved_and_loaded_like_every_other(name, tmp_path: Path):
    assert known_weights(name) is None
    classifier = replace_head(load_classifier(name, "random", class_names=("a", "b", "c"), seed=2), 4, None, seed=1)
    save_checkpoint(classifier, tmp_path / "c")
    loaded = load_checkpoint(tmp_path / "c")
    assert (loaded.architecture, loaded.num_classes, loaded.input_size) == (name, 4, (32, 32))
    assert weights_sha256(loaded) == weights_sha256(classifier)
    assert loaded(images(2)).shape == (2, 4)
    with pytest.raises(InputError, match=f"`{name}` has no pretrained weights; train it"):
        load_classifier(name, "pretrained")
    larger = load_classifier(name, "random", input_size=(40, 40))
    assert larger(images(1, 40)).shape == (1, 10)
    assert hasattr(larger, "local_logits") == hasattr(larger, "receptive_field") == name.startswith("bagnet")


@pytest.mark.parametrize("name", ["small", "bagnet5"])
def test_a_pass_without_gradients_has_the_same_bits_and_leaves_what_it_was_given(name):
    """Without gradients, ReLUs are computed in place."""
    classifier = load_classifier(name, "random", seed=2).eval()
    x = images(2, 28)
    with torch.no_grad():
        found = classifier(x)
    assert torch.equal(found, classifier(x))
    assert torch.equal(x, images(2, 28))
    seen = []
    classifier.module.stem.register_forward_hook(lambda *call: seen.append(call[2]))
    classifier(x)
    assert bool((seen[0] < 0).any()), "what a hook keeps for its gradient is not written over"


def test_local_logits_normalise_and_lower_like_logits():
    classifier = load_classifier("bagnet5", "random", seed=2)
    x = images(2)
    with torch.inference_mode():
        assert torch.equal(classifier.local_logits(x), classifier.module.local_logits(classifier.prepared(x)))
        lowered = classifier.lowered(torch.bfloat16)
        torch.testing.assert_close(lowered.local_logits(x).float(), classifier.local_logits(x), atol=0.05, rtol=0.05)
