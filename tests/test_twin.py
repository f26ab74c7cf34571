"""The fast copy of a network: the same function, never older than the network, and never in its way."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import patchproof as pp
from patchproof.masking import Evaluator, Measured, network
from patchproof.models import ImageClassifier, load_classifier, weights_sha256


def forward(classifier, images, precision="fp32") -> torch.Tensor:
    return network(classifier, precision=precision)(images, None)


@pytest.fixture
def classifier() -> ImageClassifier:
    return load_classifier("small", "random", num_classes=5, seed=3).eval()


@pytest.fixture
def images(generator) -> torch.Tensor:
    return torch.rand(6, 3, 28, 28, generator=generator)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_fast_copy_answers_nearly_the_same_in_the_type_asked_for(classifier, images, precision):
    exact, fast = forward(classifier, images), forward(classifier, images, precision=precision)
    assert 0 < float((exact - fast).abs().max()) < 0.05 * float(exact.abs().max())
    twin = next(iter(classifier._twins.values())).network
    assert twin is not None
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16 if precision == "bf16" else torch.float16}


def test_the_fast_copy_follows_every_way_of_changing_the_weights(classifier, images):
    forward(classifier, images, precision="bf16")

    def follows(what: str) -> None:
        fresh = forward(copy.deepcopy(classifier), images, precision="bf16")
        assert torch.equal(forward(classifier, images, precision="bf16"), fresh), what

    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.5)
    classifier.train()(images).square().sum().backward()
    optimizer.step()
    classifier.eval()
    follows("optimiser and batch statistics")
    classifier.load_state_dict({k: v * 0.5 for k, v in classifier.state_dict().items()})
    follows("load_state_dict")
    with torch.no_grad():
        next(classifier.parameters()).mul_(3)
    follows("in place")
    weight = next(iter(classifier.module.parameters()))
    weight.data = weight.data * 0.5
    follows("replaced")
    weight.data.mul_(-2)  # leaves no trace, so it takes a new batch of images to be seen
    classifier.refresh()
    follows("behind torch's back")
    evaluator = Evaluator(classifier, Measured(precision="bf16", tau=1e-9, tau_fp32=1e-12))
    evaluator.labels(images)
    weight.data.mul_(-2)
    evaluator.labels(images)
    follows("behind torch's back, a batch later")
    last = [name for name, part in classifier.module.named_modules() if isinstance(part, nn.Linear)][-1]
    parent = classifier.module.get_submodule(last.rpartition(".")[0])
    setattr(parent, last.rpartition(".")[2], nn.Linear(classifier.module.get_submodule(last).in_features, 7).eval())
    follows("another last layer")


def test_every_new_batch_sees_weights_changed_behind_torchs_back(classifier, images):
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=3)
    masks = pp.covering_masks(threat, per_axis=2)

    def defense(classifier, tau):
        engine = Measured(precision="bf16", tau=tau, tau_fp32=1e-12)
        return pp.PatchCleanser(classifier, masks, threat, engine=engine)

    defense(classifier, 1e9).predict(images)
    for parameter in classifier.parameters():
        parameter.data.mul_(-1)
    fresh = defense(copy.deepcopy(classifier), 1e-9).predict(images)
    assert torch.equal(fresh, defense(classifier, 1e-9).predict(images))


def test_the_fast_copy_can_be_made_inside_inference_mode(classifier, images):
    with torch.inference_mode():
        forward(classifier, images, precision="bf16")
    with torch.no_grad():
        next(classifier.parameters()).mul_(2)
    forward(classifier, images, precision="bf16")


def test_the_fast_copy_is_no_part_of_the_classifier(classifier, images):
    before = weights_sha256(classifier), list(classifier.state_dict()), len(list(classifier.modules()))
    forward(classifier, images, precision="bf16")
    assert (weights_sha256(classifier), list(classifier.state_dict()), len(list(classifier.modules()))) == before
    assert copy.deepcopy(classifier)._twins == {}
    assert pickle.loads(pickle.dumps(classifier))._twins == {}


def test_a_network_that_cannot_be_converted_runs_under_autocast(images):
    class Stubborn(nn.Module):
        """Holds a float32 constant of its own."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3 * 28 * 28, 4)
            self.constant = [torch.ones(4, 4)]

        def forward(self, x):
            return self.linear(x.flatten(1)) @ self.constant[0]

    torch.manual_seed(0)
    classifier = ImageClassifier(Stubborn(), mean=(0.5,) * 3, std=(0.2,) * 3, input_size=(28, 28), num_classes=4).eval()
    assert classifier.lowered(torch.bfloat16) is None
    exact, fast = forward(classifier, images), forward(classifier, images, precision="bf16")
    assert torch.allclose(exact, fast, atol=0.1)
