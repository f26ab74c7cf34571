"""The fast copy of a network: nearly the same function, always with the current weights, and no part of the network."""

from __future__ import annotations

import copy
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import patchproof as pp
import reference
from patchproof.data import open_dataset
from patchproof.masking import Evaluator, Measured, network
from patchproof.models import ImageClassifier, load_classifier, weights_sha256
from patchproof.models._twin import Twin, rounded
from small_model import fitted_classifier

ENGINE = Path(__file__).parents[1] / "benchmarks" / "engine.py"


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
    kept = {
        name for name, part in twin.named_modules() for p in part.parameters(recurse=False) if p.dtype == torch.float32
    }
    normalisations = {name for name, part in twin.named_modules() if isinstance(part, nn.BatchNorm2d)}
    assert kept == {"head", *normalisations}


@pytest.mark.parametrize("model", ["small", "resnet10t", "resnetv2_50"])
def test_a_compiled_copy_has_batch_normalisation_folded_in(model, generator, monkeypatch):
    """If it follows a convolution whose output nothing else takes. The compiler itself is disabled here."""
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    classifier = load_classifier(model, "random", num_classes=5, input_size=(64, 64), seed=3).eval()
    pixels = torch.rand(4, 3, *classifier.input_size, generator=generator)
    for part in classifier.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-0.5, 0.5, generator=generator)
            part.running_var.uniform_(0.2, 5, generator=generator)
            nn.init.uniform_(part.weight, 0.5, 2, generator=generator)
            nn.init.uniform_(part.bias, -0.5, 0.5, generator=generator)

    def fast(compiled: bool) -> torch.Tensor:
        return network(classifier, precision="fp16", compiled=compiled)(pixels, None)

    fast(True)
    folded = classifier._twins[torch.float16, True].network
    before = [part for part in classifier.modules() if isinstance(part, nn.BatchNorm2d)]
    left = [part for part in folded.modules() if isinstance(part, nn.BatchNorm2d)]
    assert len(left) < len(before)
    assert not left or model == "resnetv2_50", "only pre-activation networks normalise what no convolution made"
    with torch.no_grad():
        before[0].weight.mul_(2)  # it follows
    exact = forward(classifier, pixels)
    errors = [float((fast(compiled) - exact).abs().max()) for compiled in (False, True)]
    assert max(errors) < 0.01 * float(exact.abs().max())


class TwoNames(nn.Module):
    """Its normalisation is called by another name than the one it is listed under."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.norm, self.head = self.layers[1], nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers[0](images)).relu().mean(dim=(2, 3)))


def hooked() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    network[1].register_forward_hook(lambda _, __, output: output.square())
    return network


@pytest.mark.parametrize("make", [TwoNames, hooked])
def test_normalisations_that_cannot_be_folded_are_scaled(make, generator, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    network = make().eval()
    pixels = torch.rand(4, 3, 8, 8, generator=generator)
    twin = Twin.of(network, torch.float16, input_shape=(3, 8, 8), compiled=True)
    assert not twin.folded
    exact, fast = network(pixels), twin.network(pixels.half())
    assert float((exact - fast).abs().max()) < 0.01 * float(exact.abs().max())


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
    classifier.module.head = nn.Linear(classifier.module.head.in_features, 7).eval()
    follows("another last layer")


def test_every_new_batch_sees_weights_changed_behind_torchs_back(classifier, images):
    engine = Measured(precision="bf16", tau=1e-9, tau_fp32=1e-12)
    threat, labels = pp.PatchThreat.square(image_size=(28, 28), pixels=3), torch.zeros(6, dtype=torch.int64)

    def ways(classifier):
        """Whatever asks for passes, batch after batch."""
        masked = pp.defense("patchcleanser", classifier, threat, per_axis=2, engine=engine)
        views = pp.defense("smoothed-vit", classifier, threat, band=12, engine=engine)
        greedy = pp.masking_strategy("greedy3x3", image_size=(28, 28), generator=torch.Generator(), engine=engine)
        return masked.predict, masked.evaluator.labels, views.predict, lambda x: greedy(classifier, x, labels)

    for number, ask in enumerate(ways(classifier)):
        ask(images)
        for parameter in classifier.parameters():
            parameter.data.mul_(-1)
        assert torch.equal(ask(images), ways(copy.deepcopy(classifier))[number](images))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 1, 3, 3), (4, 3, 5, 5), (2, 2, 1, 7)])
def test_rounding_keeps_the_sum_of_every_kernel(generator, dtype, shape):
    weight = torch.randn(shape, generator=generator)
    cast, plain = rounded(weight, dtype).float(), weight.to(dtype).float()
    unit = torch.finfo(dtype).eps
    off = (cast - weight).sum(dim=(2, 3)).abs()
    assert bool((off <= unit * shape[2] * shape[3] * unit * weight.abs().amax(dim=(2, 3)) + unit * 0.5).all())
    assert off.mean() < 0.2 * (plain - weight).sum(dim=(2, 3)).abs().mean()
    assert bool(((cast - weight).abs() <= shape[2] * shape[3] * unit * weight.abs().amax()).all())
    pointwise = torch.randn(5, 4, 1, 1, generator=generator)
    assert torch.equal(rounded(pointwise, dtype), pointwise)


class Mixed(nn.Module):
    """Convolutions and normalisations in every order. With `uses_raw`, scaling one of them would be wrong."""

    def __init__(self, uses_raw: bool) -> None:
        super().__init__()
        self.uses_raw = uses_raw
        self.stem, self.stem_bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.depthwise_bn = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.grouped, self.grouped_bn = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8, affine=False)
        self.first_bn, self.after = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.twice, self.twice_bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.shared, self.shared_bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_bn(self.stem(x)))
        x = x + torch.relu(self.depthwise_bn(self.depthwise(x)))
        x = torch.relu(self.grouped_bn(self.grouped(x)))
        x = self.after(torch.relu(self.first_bn(x)))
        for _ in range(2):
            x = torch.relu(self.twice_bn(self.twice(x)))
        raw = self.shared(x)
        x = self.shared_bn(raw) + (raw if self.uses_raw else 0)
        return self.head(self.norm(x.mean(dim=(2, 3))))


def with_statistics(network: nn.Module, generator: torch.Generator) -> nn.Module:
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(generator=generator)
            part.running_var.uniform_(0.2, 3, generator=generator)
            if part.affine:
                nn.init.normal_(part.weight, 1.0, 0.3, generator=generator)
                nn.init.normal_(part.bias, generator=generator)
    return network.eval()


@pytest.mark.parametrize("uses_raw", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_convolution_is_scaled_only_if_that_is_exact(generator, uses_raw, fresh):
    """`fresh`: the statistics are still those of a new network when it is copied, and change later."""
    torch.manual_seed(1)
    network = Mixed(uses_raw).eval() if fresh else with_statistics(Mixed(uses_raw), generator)
    images = torch.rand(4, 3, 10, 10, generator=generator)
    twin = Twin.of(network, torch.float32, input_shape=(3, 10, 10), compiled=False)
    scaled = ["stem", "depthwise", "grouped", *([] if uses_raw else ["shared"])]
    assert twin.scaled == [(name, f"{name}_bn") for name in scaled]
    exact = with_statistics(network, generator)(images).detach()
    assert torch.allclose(twin.following(network)(images), exact, rtol=1e-4, atol=1e-5)  # type: ignore[misc]
    half = Twin.of(network, torch.bfloat16, input_shape=(3, 10, 10), compiled=False).network
    assert float((half(images.bfloat16()) - exact).abs().amax()) < 0.05 * float(exact.abs().amax())


def test_outputs_written_in_place_are_not_scaled_and_odd_layers_still_run(generator):
    torch.manual_seed(0)
    clipped = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU6(inplace=True), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 3)
    )

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = Scale(), nn.Linear(300, 3)

        def forward(self, x):
            return self.linear(self.scale(x).flatten(1))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.by

    for odd in (with_statistics(clipped, generator), Odd().eval()):
        images = torch.rand(2, 3, 10, 10, generator=generator)
        twin = Twin.of(odd, torch.bfloat16, input_shape=(3, 10, 10), compiled=False)
        assert twin.scaled == []
        assert torch.allclose(twin.network(images.bfloat16()).float(), odd(images), atol=0.1)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_a_hostile_scale_in_batch_normalisation_costs_little(generator, monkeypatch, precision):
    """Rescaling keeps the function, but in fp16 the output of its convolutions would overflow."""
    monkeypatch.syspath_prepend(str(ENGINE.parent))
    original = fitted_classifier().eval()
    scaled = runpy.run_path(str(ENGINE))["rescaled"](original, generator)
    assert max(float(bn.running_var.amax()) for bn in scaled.modules() if isinstance(bn, nn.BatchNorm2d)) > 1e8
    images = torch.from_numpy(open_dataset("fashion-mini").pixels[:1000:100])[:, None].expand(-1, 3, -1, -1) / 255
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=4)
    masks = pp.covering_masks(threat, per_axis=2)
    found = []
    for classifier in (original, scaled):
        wanted = pp.Engine(precision=precision)
        engine, drift = pp.check_classifier(classifier, images, masks, engine=wanted, copies=64)
        defense = pp.PatchCleanser(classifier, masks, threat, engine=engine, exhaustive=True)
        labels = Evaluator(original, reference.measured()).labels(images)
        found.append((engine, drift, defense.certify(images, labels)))
    (_, drift, certificates), (_, scaled_drift, scaled_certificates) = found
    assert torch.equal(certificates.certified, scaled_certificates.certified)
    assert certificates.certified.any()
    assert scaled_drift.changes[precision] < 3 * drift.changes[precision], "rounded otherwise, not worse"
    assert scaled_certificates.forwards.sum() < 1.2 * certificates.forwards.sum()


def test_a_layer_that_the_cast_would_harm_stays_in_float32(generator):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(6 * 16, 5)
    ).eval()
    images = torch.rand(8, 3, 8, 8, generator=generator)
    with torch.no_grad():
        expected = network(images)
        network[0].weight *= 1e-7  # below what fp16 holds
        network[0].bias *= 1e-7
        network[2].weight *= 1e7  # beyond it
    for dtype, kept in ((torch.float16, {0, 2, 4}), (torch.bfloat16, {4})):
        twin = Twin.of(network, dtype, input_shape=(3, 8, 8), compiled=False).network
        assert {i for i in (0, 2, 4) if twin[i].weight.dtype == torch.float32} == kept  # type: ignore[index]
    small = Twin.of(network[2:], torch.float16, input_shape=(6, 6, 6), compiled=False).network
    with torch.inference_mode():
        middle = torch.rand(8, 6, 6, 6, generator=generator) * 1e-7
        off = small(middle.half().float().half()) - network[2:](middle.half().float())
    assert off.abs().amax() < 0.05 * expected.abs().amax()
