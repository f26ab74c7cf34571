"""Usual mistakes raise a clear error where the wrong value enters, and hints only name what `pp` exports."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import jaxtyping
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import patchproof as pp
from patchproof.data import spread_indices
from patchproof.runs import training_images
from patchproof.runs.executors import InProcess
from patchproof.settings import DEFENSE_OPTIONS


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """Switch off the run-time checks of annotations that the other tests have."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


THREAT = pp.PatchThreat((16, 16), ((3, 3),))
IMAGES, LABELS = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])


class Net(nn.Module):
    """A classifier whose forward ends in `turn(logits)`."""

    def __init__(self, turn=lambda logits: logits, **attributes):
        super().__init__()
        self.head, self.turn = nn.Linear(3 * 16 * 16, 4), turn
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, images):
        return self.turn(self.head(images.flatten(1)))


class Local(Net):
    """One cell that sees everything."""

    receptive_field = (16, 1, 0)

    def local_logits(self, images):
        return self(images)[:, :, None, None]


BUILDING = {
    "patchcleanser": (Net, {"per_axis": 2}),
    "alarm": (Net, {"per_axis": 2}),
    "ibp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), {}),
    "smoothed-vit": (Net, {"band": 4}),
    "derandomized-smoothing": (Net, {}),
    "patchguard-smoothing": (Net, {}),
    **dict.fromkeys(("clipped-bagnet", "patchguard-bagnet", "bagcert"), (Local, {})),
}


def build(name="patchcleanser", *args, **attributes):
    kind, options = BUILDING[name]
    return pp.defense(name, kind(*args, **attributes).eval(), THREAT, **options)


@pytest.mark.parametrize("name", pp.DEFENSES)
def test_images_that_are_none_are_refused_by_predict_and_certify(name):
    wrong = [
        (IMAGES.numpy(), r"float32 tensor with values in \[0, 1\], not ndarray, float32 of \(2, 3, 16, 16\)"),
        (IMAGES.double(), r"not torch.float64 of .*e.g. torch.as_tensor\(images\).float\(\)"),
        (IMAGES.half(), "not torch.float16"),
        (IMAGES.to("meta"), "must be a dense tensor with values, not torch.strided on the device meta"),
        (IMAGES.to_sparse(), r"not torch.sparse_coo on .*; e.g. images.to_dense\(\)"),
        ((IMAGES * 255).byte(), "not torch.uint8 .*bytes divided by 255"),
        (Image.new("RGB", (16, 16)), "float32 tensor .*not Image"),
        (IMAGES * 255, r"values in \[0, 1\], not from .* to 25\d.*divide bytes by 255"),
        (IMAGES * float("nan"), "not from nan to nan"),
        (IMAGES.permute(0, 2, 3, 1), r"\(images, channels, height, width\).*not \(2, 16, 16, 3\); resize or permute"),
    ]
    if BUILDING[name][0] is Net:
        wrong.append((IMAGES[:, :1], r"fails on images of \(1, 16, 16\) .*test_mistakes.py:\d+, in forward"))
    defense = build(name)
    for images, words in wrong:
        with pytest.raises((pp.InputError, pp.CheckError), match=words):
            defense.predict(images)
        with pytest.raises((pp.InputError, pp.CheckError), match=words):
            defense.certify(images, LABELS)


def test_tensors_for_runs_are_refused_or_answered_one_by_one():
    for wrong, words in (
        (IMAGES[0] * 255, "divide bytes by 255"),
        ((IMAGES[0] * 255).byte(), "divide bytes by 255"),
        (IMAGES[0] * float("nan"), "from nan to nan"),
        (IMAGES[:1], r"\(channels, height, width\); drop the first dimension: image\[0\]$"),
        (IMAGES[0, 0], r"\(channels, height, width\)$"),
    ):
        with pytest.raises(pp.InputError, match=f"none of the 1 images can be read, e.g. 00000: .*{words}"):
            pp.certify(build(), [(wrong, 0)])
        good, bad = pp.predict(build(), [IMAGES[0], wrong])
        assert (good.path, bad.path) == ("00000", "00001")
        assert re.search(words, bad.reason)
    with pytest.raises(pp.InputError, match=r"\(ndarray, float32 of \(3, 16, 16\); int\); expected a sequence"):
        pp.certify(build(), [(IMAGES[0].numpy(), 0)])
    with pytest.raises(pp.InputError, match="image 0 is no image file, PIL image or float tensor"):
        pp.predict(build(), [IMAGES[0].numpy()])
    for workers, words in ((0, "at least 1"), (-1, "at least 1"), (1.5, "a whole number or None")):
        with pytest.raises(pp.InputError, match=f"workers must be {words}, not {workers}"):
            pp.certify(build(), [(IMAGES[0], 0)], workers=workers)
        with pytest.raises(pp.InputError, match=f"workers must be {words}, not {workers}"):
            pp.train(Net(), [(IMAGES[0], 0)], workers=workers)
    (empty,) = pp.predict(build(), [Image.new("RGB", (0, 0))])
    assert empty.reason == "it has no pixels"
    (folder,) = pp.predict(build(), [str(Path(__file__).parent)])
    assert folder.reason.startswith("it is a folder; give the image files in it")
    with pytest.raises(pp.InputError, match=r"not str; for one image, \[image\]"):
        pp.predict(build(), "cat.png")
    with pytest.raises(pp.InputError, match="Net is no defence"):
        pp.predict(Net().eval(), [IMAGES[0]])


def test_broken_images_and_odd_calls_are_met_as_they_were(tmp_path):
    for index, name in enumerate("ab" * 3):
        path = tmp_path / "photos" / name / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    (tmp_path / "photos" / "a" / "0.png").write_bytes(b"no image")
    plan = pp.Plan(strategy="none", epochs=1, batch_size=6, learning_rate=0.01)
    data = pp.open_dataset(str(tmp_path / "photos"))
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    assert pp.train(network, data, plan, skip_bad=True).classifier is network
    for wrong in (nn.Identity(), lambda images: images):
        with pytest.raises(pp.InputError, match=r"classifier must be an nn.Module with parameters, not"):
            pp.train(wrong, data, plan)
    assert not hasattr(pp.certify(build(), [(IMAGES[0], 0)]), "attacked")
    choose = pp.masking_strategy("greedy", image_size=(16, 16), generator=torch.Generator())
    with pytest.raises(pp.InputError, match="labels run from 0 to 7"):
        choose(Net().eval(), IMAGES, torch.tensor([0, 7]))
    for images, labels, words in (
        (IMAGES.numpy(), LABELS, "images must be a float32 tensor .*, not ndarray"),
        (IMAGES, LABELS.float(), "one int64 number for each of the 2 images, not torch.float32"),
        (IMAGES, LABELS[:1], r"one int64 number for each of the 2 images, not torch.int64 of \(1,\)"),
    ):
        with pytest.raises(pp.InputError, match=words):
            choose(Net().eval(), images, labels)
    with pytest.raises(pp.InputError, match="target must be one of predicted, label, not 'true'"):
        pp.masking_strategy("gutout", image_size=(16, 16), generator=torch.Generator(), target="true")
    with pytest.raises(pp.InputError, match=r"image_size must be at least one pixel each way"):
        pp.PatchThreat.square(image_size=(-1, 64), percent=3)


def test_a_network_that_says_neither_size_nor_classes_is_not_guessed_at(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3)

        def forward(self, images):
            return self.head(images).mean(dim=(2, 3))

    for name, sizes in (("mixed", (20, 24)), ("same", (20, 20))):
        for index, side in enumerate(sizes):
            path = tmp_path / name / "train" / "ab"[index] / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (30, side)).save(path)
    plan = pp.Plan(strategy="none", epochs=1, batch_size=2, learning_rate=0.01)
    network = Pooled()
    mixed, same = (pp.open_dataset(str(tmp_path / name), split="train") for name in ("mixed", "same"))
    with pytest.raises(
        pp.InputError, match=r"differ in size, e.g. 20×30 or 24×30 pixels, .* set classifier.input_size"
    ):
        pp.train(network, mixed, plan)
    with pytest.raises(pp.InputError, match="wrong number of classes: same has 2, the classifier 4 and no class names"):
        pp.certify(pp.defense("patchcleanser", network.eval(), pp.PatchThreat((20, 30), ((3, 3),))), same)


def test_pictures_and_tensors_of_the_same_pixels_get_the_same_answer():
    defense, pixels = build(), (IMAGES * 255).byte()
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    mixed = pp.predict(defense, [pictures[0], pixels[1] / 255, pixels[0] / 255, pictures[1]])
    assert [answer.margin for answer in mixed[:2]] == [answer.margin for answer in mixed[2:]]


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (lambda logits: (logits, logits), "returns a tuple, not a tensor of logits"),
        (lambda logits: {"logits": logits}, "returns a dict, .*model\\(images\\).logits"),
        (lambda logits: logits[:, 0], r"maps \d+ images to \(\d+,\)"),
        (lambda logits: logits @ torch.ones(4, 1).half(), r"images are float32: call model.float\(\)"),
        (lambda logits: logits.double() @ torch.ones(4, 1), r"images are float32: call model.float\(\)"),
        (lambda logits: {}["mine"], r"KeyError: 'mine' \(.*test_mistakes.py:\d+, in <lambda>\)"),
    ],
)
def test_what_a_forward_returns_or_raises_is_said_wherever_it_is_called(turn, words):
    data = [(IMAGES[0], 0), (IMAGES[1], 1)]
    plan = pp.Plan(strategy="rand", epochs=1)
    for ask in (
        lambda: build("alarm", turn).predict(IMAGES),
        lambda: build("patchcleanser", turn).certify(IMAGES, LABELS),
        lambda: pp.certify(build("patchcleanser", turn), data),
        lambda: pp.predict(build("patchcleanser", turn), [IMAGES[0]]),
        lambda: pp.train(Net(turn, num_classes=4, input_size=(16, 16)), data, plan, validation=data),
        lambda: pp.Ensemble([Net(turn).eval()])(IMAGES),
    ):
        with pytest.raises(pp.CheckError, match=words) as caught:
            ask()
        assert isinstance(caught.value.__cause__, KeyError) == ("KeyError" in words)
        assert "built for" not in str(caught.value), "it is not the shape of the images"


def test_constructors_name_the_parameter():
    for make, words in (
        (lambda: pp.PatchThreat(image_size=64, patch_sizes=((5, 5),)), r"image_size .* e.g. \(64, 64\), not 64"),
        (lambda: pp.PatchThreat((64, 64), (5, 5)), r"patch_sizes is a tuple of \(height, width\)"),
        (lambda: pp.load_classifier("small", "embedded", input_size=64), "input_size must be"),
        (lambda: pp.masking_strategy("greedy", image_size=64, generator=torch.Generator()), "image_size must be"),
        (lambda: pp.covering_masks(THREAT, per_axis=2.5), "per_axis must be a whole number"),
        (lambda: pp.covering_masks((16, 16), per_axis=3), "threat must be a pp.PatchThreat"),
        (lambda: pp.PatchCleanser(Net(), THREAT, pp.covering_masks(THREAT, per_axis=3)), "masks must be a pp.MaskSet"),
        *(
            (lambda name=name: pp.defense(name, Net(), THREAT, engine="fp16"), "engine must be a pp.Engine")
            for name in pp.DEFENSES
        ),
        (lambda: pp.defense("alarm", "resnet50", THREAT), "pp.load_classifier makes one"),
        (lambda: pp.Ensemble(Net()), r"members must be a list .* e.g. pp.Ensemble\(\[first, second\]\)"),
        (
            lambda: pp.certify(build(), [(IMAGES[0], 0)], executor="ray"),
            "executor must be a patchproof.runs.executors.",
        ),
        (
            lambda: pp.certify(build(), [(IMAGES[0], 0)], executor=InProcess),
            "executor must be a patchproof.runs.executors.",
        ),
        (lambda: pp.Ensemble([Net(), Net]), "members must be a list of at least one classifier"),
        (lambda: pp.train(Net(input_size=16), [(IMAGES[0], 0)]), "classifier.input_size must be .* not 16"),
        (lambda: pp.load_checkpoint("a\0b"), "folder must be a path, not"),
        (lambda: pp.certify(build(), [(IMAGES[0], 0)], config={"mine": {1}}), "config must be JSON, with finite"),
        (lambda: pp.certify(build(), [(IMAGES[0] - 1, 0)]), "expected 0 to 1; leave normalisation to the classifier"),
        (lambda: pp.predict(build(), IMAGES[0]), r"not one image \(c h w\); for one image, \[image\]"),
        (
            lambda: pp.PatchThreat.square(image_size=(64, 64), percent="3%"),
            "percent must be a number, e.g. 3, not '3%'",
        ),
        (lambda: pp.defense(Net(), "alarm", THREAT), r"name must be text, e.g. pp.defense\(.*, not Net$"),
        (lambda: pp.defense("alarm", Net, THREAT), r"Net is a class; give Net\(\)"),
        (lambda: pp.certify(build(), [(IMAGES[0], 0)], limit="5"), "limit must be a whole number or None, not '5'"),
        (lambda: spread_indices(range(9), "5"), "limit, .*, not '5'; leave it out"),
        (
            lambda: pp.certify(build(), DataLoader([(IMAGES[0], 0)])),
            "DataLoader is no data set: .*; give loader.dataset",
        ),
        (lambda: pp.defense("alarm", THREAT, Net()), "threat must be a pp.PatchThreat, .*, not Net"),
        (lambda: pp.train(Net().requires_grad_(False), [(IMAGES[0], 0)]), "all parameters .* are frozen"),
        (lambda: pp.Plan(epochs=True), "epochs must be a whole number, not True"),
        (lambda: pp.Plan(validation_images=0), "validation_images must be at least 1, not 0"),
        (lambda: pp.Plan(batch_size="64"), "batch_size must be a whole number, not '64'"),
        (lambda: pp.Plan(learning_rate="0.1"), "learning_rate must be a number or None, not '0.1'"),
        (lambda: pp.Plan(mask_patch=39), "mask_patch must be text, e.g. '3%', not 39"),
        (lambda: pp.Plan(teacher="x"), r"teacher must be a classifier, e.g. pp.load_checkpoint\(…\), not 'x'"),
        *(
            (lambda fill=fill: build(fill=fill), r"fill must be one number in \[0, 1\] per channel")
            for fill in (7, 0.5, "grey", (7, 7, 7), (float("nan"),) * 3)
        ),
        *(
            (lambda own=own: build("smoothed-vit", **own), rf"classifier.{next(iter(own))} must be {words}")
            for own, words in (
                ({"input_size": 16}, r"\(height, width\) in whole numbers, not 16"),
                ({"class_names": 5}, "a list of names or None, not 5"),
                ({"class_names": "abcd"}, "a list of names or None, not 'abcd'"),
                ({"num_classes": "4"}, "a whole number, not '4'"),
                ({"interpolation": "cubic"}, "one of nearest, bilinear, bicubic, not 'cubic'"),
                ({"crop_pct": 0}, r"positive \(the part of the resized side that is kept\), not 0"),
                ({"crop_pct": float("nan")}, r"positive \(the part of the resized side that is kept\), not nan"),
                ({"token_size": 4}, r"\(height, width\) in whole numbers or None, not 4"),
            )
        ),
        (lambda: build(token_size=4), "classifier.token_size must be"),
        (
            lambda: pp.load_classifier("small", "embedded", class_names="ten"),
            "class_names must be a list of names or N",
        ),
        *(
            (lambda seed=seed, make=make: make(seed=seed), rf"seed must be in \[0, 2\^63\), not {seed}")
            for seed in (-1, 2**70)
            for make in (pp.Plan, pp.AttackPlan, lambda seed: pp.load_classifier("small", "random", seed=seed))
        ),
        (
            lambda: pp.defense("patchcleanser", Net(), THREAT, exhaustive="no"),
            "exhaustive must be True or False, not 'no'",
        ),
        (lambda: replace(build(), exhaustive="no"), "exhaustive must be True or False, not 'no'"),
        (lambda: pp.Plan(mask_patch="3"), "a patch looks like 3%, 39px or 20x60px, not `3`"),
        (
            lambda: pp.Plan(strategy=lambda classifier, images, labels: None),
            "strategy must be a pp.MaskingStrategy, .*'i",
        ),
        (lambda: pp.check_classifier(Net().eval(), IMAGES, THREAT), "masks must be a pp.MaskSet, .*, not PatchThreat"),
        (lambda: build(fill=(0.1, 0.2)).predict(IMAGES), "fill has 2 channels, the images have 3"),
    ):
        with pytest.raises(pp.InputError, match=words):
            make()
    with pytest.raises(AttributeError, match="module 'patchproof' has no attribute 'certfy'"):
        pp.certfy  # noqa: B018
    for tries, each in ((2, (2, 2, 2, 2)), ((2, 2, 2, 1), (2, 2, 2, 1)), ("3", (3, 3, 3, 3))):
        plan = pp.Plan(strategy="memory", memory_tries=tries)
        assert plan.tries() == each
        assert plan.memory_tries in ("2", "2,2,2,1", "3"), "a manifest has the same text either way"
    for option in ({"memory_refresh": 2}, {"views": 4}, {"gutout_target": "label"}):
        with pytest.raises(pp.InputError, match="cannot be set with the strategy greedy, which does not use it"):
            pp.Plan(**option)
    assert pp.Plan(epochs=np.int64(3), learning_rate=np.float32(0.5)).epochs == 3, "numbers may be numpy's"
    filled = pp.certify(build(fill=torch.full((3,), 0.5)), [(IMAGES[0], 0)])
    assert filled.content["status"] == "complete", "numbers may come as a tensor"


def unread(number):
    raise AssertionError("an image was read")


class Unread:
    """Images that must not be looked at."""

    __getitem__ = staticmethod(unread)

    def __len__(self):
        return 8


CALLS = {
    "certify": lambda **given: pp.certify(build(turn=unread), Unread(), **given),
    "attack": lambda **given: pp.attack(build(turn=unread), Unread(), **given),
    "train": lambda **given: pp.train(Net(turn=unread), Unread(), **given),
    "predict": lambda **given: pp.predict(build(turn=unread), Unread(), **given),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_wrong_argument_of_a_run_is_refused_before_an_image_is_read(verb, tmp_path):
    wrong = {"preprocessing": (3, "a pp.Preprocessing")}
    callbacks = {"train": ("on_start", "on_step", "on_epoch"), "predict": ("on_answer",)}
    wrong |= dict.fromkeys(callbacks.get(verb, ("on_start", "on_record")), (3, "a function"))
    if verb != "predict":
        wrong |= {"folder": (3, "a path"), "resume": (True, "folder=…")}
        wrong |= {"config": (3, "a mapping")}
        for blank in ("", " ", Path(" "), "a\0b"):  # neither the current one nor one that nobody sees
            with pytest.raises(pp.InputError, match=r"folder must be a path .*, not "):
                CALLS[verb](folder=blank)
        (tmp_path / "mine").touch()
        with pytest.raises(pp.InputError, match="holds 'mine' but no manifest"):
            CALLS[verb](folder=tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["mine"], "a folder that is refused stays as it was"
    if verb == "attack":
        wrong |= {"on_step": (3, "a function"), "plan": (3, "a pp.AttackPlan")}
    if verb == "train":
        wrong |= {
            "checkpoint_minutes": ("x", "a number"),
            "accelerator": (3, "be an accelerate.Accelerator"),
            "plan": (3, "a pp.Plan"),
        }
    for name, (value, words) in wrong.items():
        with pytest.raises(pp.InputError, match=f"^{name}.*{words}"):
            CALLS[verb](**{name: value})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for name, options in DEFENSE_OPTIONS.items()
        for option, hint in get_type_hints(options).items()
        for value in {int: ("4", 2.5), float: ("x",)}.get(hint, ())
    ],
)
def test_options_of_a_defence_that_are_counted_are_whole_numbers(name, option, value):
    with pytest.raises(pp.InputError, match=f"{option} must be a.* number.*, not {value!r}"):
        pp.defense(name, BUILDING[name][0]().eval(), THREAT, **{option: value})


@pytest.mark.parametrize("label", [-1, 99])
@pytest.mark.parametrize("known", [{}, {"num_classes": 4}])
def test_a_wrong_label_is_refused_before_tau_is_measured_and_before_training(monkeypatch, label, known):
    """Also of a network that does not say how many classes it has; an image that cannot be read has no label."""
    monkeypatch.setattr("patchproof.runs._certify.measure_tau", lambda *_, **__: pytest.fail("τ is measured"))
    data = [(IMAGES[0] * 255, -1), (IMAGES[0], 0), (IMAGES[1], label)]
    with pytest.raises(pp.InputError, match=f"image 2 has the label {label}; labels are 0 to 3"):
        pp.certify(build(**known), data)
    monkeypatch.setattr("patchproof.training.loop.Trainer.run", lambda _: pytest.fail("it trains"))
    good, plan = [(IMAGES[0], 0), (IMAGES[1], 1)], pp.Plan(strategy="none", epochs=1, batch_size=2)
    for kind, images, validation in (("training", data, good), ("validation", good, data)):
        with pytest.raises(pp.InputError, match=f"^{kind} image 2 has the label {label}; labels are 0 to 3"):
            pp.train(Net(**known), images, plan, validation=validation, skip_bad=True)


def test_a_folder_without_images_to_validate_on_says_so(tmp_path):
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "train" / name / "0.png")
    with pytest.raises(pp.InputError, match=r"has no images to validate on, .*; name other images as validation"):
        training_images(str(tmp_path))


@pytest.mark.parametrize("known", [{}, {"num_classes": 1}])
def test_one_output_is_not_two_classes(known):
    def turn(logits):
        return logits[:, :1]

    data = [(IMAGES[0], 0), (IMAGES[1], 1)]
    for ask in (
        lambda: pp.certify(build(turn=turn, **known), data),
        lambda: pp.certify(build(turn=turn, **known), data[:1]),
        lambda: pp.predict(build(turn=turn, **known), list(IMAGES)),
        lambda: pp.train(Net(turn, **known), data, pp.Plan(strategy="none", epochs=1)),
    ):
        with pytest.raises(pp.CheckError, match=r"one output z: give two logits, e.g. torch.cat\(\[-z, z\], 1\)"):
            ask()


def test_class_names_of_another_number_than_the_outputs_are_refused():
    named = {"class_names": ["cat", "dog"]}
    for ask in (lambda: pp.certify(build(**named), [(IMAGES[0], 0)]), lambda: pp.predict(build(**named), list(IMAGES))):
        with pytest.raises(pp.CheckError, match="the classifier has 4 outputs and 2 class_names; give as many names"):
            ask()
    unmeasured = build("ibp")
    unmeasured.classifier.class_names = named["class_names"]
    unmeasured.classifier[1].bias.data[3] = 9.0
    assert pp.predict(unmeasured, list(IMAGES))[0].name == "class 3"


def test_numbers_of_numpy_and_paths_that_a_classifier_says_of_itself_are_written_as_plain_ones(tmp_path):
    own = {"num_classes": np.int64(4), "source": Path("a/b"), "crop_pct": np.float32(0.5)}
    data = [(image, 0) for image in IMAGES]
    assert len(pp.certify(build(**own), data, folder=tmp_path, limit=np.int64(1)).records) == 1
    model = json.loads((tmp_path / "manifest.json").read_text())["model"]
    assert (model["classes"], model["source"]) == (4, "a/b")
    with pytest.raises(pp.InputError, match="must be JSON, with finite numbers: object is not"):
        pp.certify(build(source=object()), data)


def test_a_bug_in_a_data_set_is_no_bad_image():
    class Mine(list):
        def __getitem__(self, number):
            return super().__getitem__(number) if number != 1 else {}["mine"]

    data = Mine([(IMAGES[0], 0)] * 3)
    for ask in (
        lambda: pp.certify(build(), data, skip_bad=True),
        lambda: pp.train(Net(), data, pp.Plan(strategy="none", epochs=1), skip_bad=True),
    ):
        with pytest.raises(pp.CheckError, match=r"fails at item 1: KeyError: 'mine' \(.*test_mistakes.py:\d+, in "):
            ask()


def test_an_unknown_defence_of_validation_is_refused_before_its_images_are_read():
    class First(Unread):
        """The first is looked at to see what the images are."""

        def __getitem__(self, number):
            return (IMAGES[0], 0) if number == 0 else unread(number)

    with pytest.raises(pp.InputError, match="unknown defence `x`"):
        pp.train(Net(), [(IMAGES[0], 0)] * 8, pp.Plan(validate_with="x", epochs=1), validation=First())


def test_hints_name_only_what_pp_exports():
    """Whatever a message shows being called is public: `pp.name(…)`, or a name of the package followed by `(`."""
    root = Path(pp.__file__).parent
    rooms = ("geometry", "models", "data", "masking", "defenses", "training", "attacks", "runs")
    trees = [ast.parse(path.read_text()) for room in rooms for path in sorted((root / room).glob("*.py"))]
    defined = {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    methods = {
        m.name
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef)
        for m in n.body
        if isinstance(m, ast.FunctionDef)
    }
    named: set[str] = set()
    for raised in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Raise)):
        for text in (c.value for c in ast.walk(raised) if isinstance(c, ast.Constant) and isinstance(c.value, str)):
            named |= set(re.findall(r"\bpp\.(\w+)", text))
            named |= {name for name in re.findall(r"(?<![\w.])(\w+)\(", text) if name in defined - methods}
    assert {"PatchThreat", "covering_masks", "open_dataset", "defense"} <= named, "the search has found the hints"
    assert named <= set(pp.__all__)
