"""Wrong arguments raise an error that names them, without any type checker, and never change an answer silently."""

from __future__ import annotations

from typing import Any

import jaxtyping
import pytest

from patchproof.types import PatchproofError

SET_UP = """
from types import SimpleNamespace
import numpy
import torch
import patchproof as pp
from patchproof.attacks import AttackPlan
from patchproof.defenses import assess, require_defense
from patchproof.masking import Engine
from patchproof.training import Plan
from patchproof.training.losses import BagCertLoss, IntervalLoss
from patchproof.types import InputError, Preprocessing

threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
masks = pp.covering_masks(threat, per_axis=2)
images = torch.rand(4, 3, 8, 8)
labels = torch.zeros(4, dtype=torch.int64)
def classifier(images):
    return images.float().flatten(1)[:, :3]
defense = pp.PatchCleanser(classifier, masks, threat)
def strategy(name="memory", **given):
    return pp.masking_strategy(name, **dict(image_size=(8, 8), generator=torch.Generator()) | given)
def own(*parts):
    described = dict(name="own", guarantee="recovery", threat=threat, describe=dict, predict=lambda images: labels)
    return SimpleNamespace(**described, certify=lambda images, labels: parts and pp.Certificates(*parts))
class OwnCall(torch.nn.Module):
    def __call__(self, classifier, images, labels, *, indices=None, epoch=0):
        return images[None, :, :1] >= 0
def check(images, classifier=classifier):
    return pp.check_classifier(classifier, images, masks, num_classes=3)
"""

WRONG = {
    "Preprocessing(resize=(8, 8), interpolation='lanczos')": "interpolation must be one of nearest, bilinear, bicubic",
    "Engine(precision='bfloat16')": "precision must be one of fp32, tf32, bf16, fp16, auto, not 'bfloat16'",
    "Engine(batch_size='many')": "batch_size must be a whole number or `auto`, not 'many'",
    "pp.PatchThreat((16, 16), ((3, 3),), patches='2')": "patches must be 1 or 2, not '2'",
    "pp.native_threat(native_size=(8, 8), patch_sizes=[(2, 2)], preprocessing=None)": "must be a pp.Preprocessing, not",
    "Plan(schedule='cosin')": "schedule must be one of step, cosine, constant",
    "Plan(loss=torch.nn.CrossEntropyLoss(), strategy='none')": "loss must be a callable, called as loss(",
    "Plan(strategy=torch.nn.Identity())": "strategy must be a pp.MaskingStrategy, called as",
    "IntervalLoss((8, 8))": "threat must be a pp.PatchThreat, not (8, 8)",
    "IntervalLoss(threat, positions=2.5)": "positions must be a whole number, not 2.5",
    "BagCertLoss.of(torch.nn.Flatten(), (8, 8))": "threat must be a pp.PatchThreat, not (8, 8)",
    "BagCertLoss(threat)": "windows must be a patchproof.geometry",
    "Plan(ema=1.0)": "ema must be in [0, 1), e.g. 0.999, not 1.0",
    "Plan(accumulate=65)": "accumulate must be in [1, batch_size], not 65",
    "Plan(label_smoothing=float('nan'))": "label_smoothing must be in [0, 1), not nan",
    "Plan(strategy='greddy')": "unknown masking strategy `greddy`; did you mean `greedy`?",
    "Plan(strategy='qqq')": "unknown masking strategy `qqq`; known are none, cutout",
    "AttackPlan(step_size=float('nan'))": "step_size must be in (0, 1], as pixels are in [0, 1], not nan",
    "AttackPlan(target='all')": "target must be one of undefended, defended, both",
    "defense.assess(images, labels[:1])": "labels must be a tensor of one int64 number for each of the 4 images",
    "defense.assess(images, labels[:, None])": "labels must be a tensor of one int64 number",
    "defense.assess(images, [0, 0, 0, 0])": "labels must be a tensor of one int64 number for each of the 4 images, not",
    "defense.pairs(images).right()": "a certificate is about a label",
    "pp.certify(SimpleNamespace(**vars(own()) | {'guarantee': 'Recovery'}), [])": "guarantee must be one of recovery",
    "assess(own(), images)": "SimpleNamespace.certify must return Certificates, not tuple",
    "assess(own(labels, labels.float(), labels), images)": "certified must be bool of shape (4,), not torch.int64",
    "pp.MaskSet((8, 8), ((0, 0, 4, 4),))": "rects holds a pp.Rect(top, left, height, width) per mask",
    "pp.MaskSet((8, 8), (None,))": "rects holds a pp.Rect(top, left, height, width) per mask, or tuples of them, not ",
    "pp.MaskSet((8, 8), pp.Rect(0, 0, 4, 4))": "rects holds a pp.Rect(top, left, height, width) per mask",
    "assess(own(labels > 0, labels, labels), images)": "margin must be a float of shape (4,), not torch.int64",
    "assess(own(labels > 0, images[:, 0, 0, 0], labels, None), images)": "evidence must map names to tensors, not None",
    "check(images[:0])": "images must be at least one, to measure τ on",
    "check(torch.rand(2, 3, 9, 9))": "images must have the shape (images, channels, height, width) with height and",
    "check(images + 1e-6 - images.max() + 1)": "images must have values in [0, 1], not from",
    "check(images - torch.nan)": "images must have values in [0, 1], not from nan to nan",
    "check(images, lambda x: x)": "it must return logits of shape (512, classes)",
    "pp.certify(classifier, images)": "function is no defence: it lacks name, guarantee, threat, predict, certify",
    "pp.certify(defense, [(images[0], -1)])": "image 0 has the label -1; labels are 0 to 2",
    "pp.PatchThreat.square(image_size=(8, 8), pixels=2.5)": "a patch size must be (height, width) in whole pixels",
    "pp.PatchThreat((8, 8, 3), ((2, 2),))": "image_size must be (height, width) in whole pixels",
    "Preprocessing(8, crop=(8, 8), cover=True)": "an image can cover a (height, width), not 8",
    "Preprocessing('224')": "resize must be a whole number or (height, width) in whole numbers or None, not '224'",
    "pp.defense('smoothed-vit', 'small', threat)": "classifier must be a callable from images to logits, not str",
    "Preprocessing(torch.tensor(3))": "resize must be a whole number or (height, width) in whole numbers or None, not",
    "Preprocessing({8, 9})": "resize must be a whole number or (height, width) in whole numbers or None, not {8, 9}",
    "Preprocessing(True)": "resize must be a whole number or (height, width) in whole numbers or None, not True",
    "Preprocessing((8, 8.5))": "resize must be a whole number or (height, width) in whole numbers or None, not (8, 8",
    "Preprocessing(8, crop=(0, 8))": "crop must be at least one pixel, not (0, 8)",
    "Preprocessing(8, crop='22')": "crop must be (height, width) in whole numbers or None, not '22'",
    "Preprocessing(8, antialias=1)": "antialias must be True or False, not 1",
    "strategy(3)": "name must be text, not 3",
    "strategy(generator=None)": "generator must be a torch.Generator, not None",
    "strategy(engine=3)": "engine must be a pp.Engine or None, not 3",
    "strategy(masks=(masks,))": "masks must be (a pp.MaskSet, a pp.MaskSet) or None, not (MaskSet(",
    "strategy(tries=2)": "tries must be (a whole number, a whole number, a whole number, a whole number), not 2",
    "strategy('column4', views='2')": "views must be a whole number, not '2'",
    "strategy('row4', ablation='rows')": "ablation must be one of column, row, block, not 'rows'",
    "strategy(refresh=1.5)": "refresh must be a whole number, not 1.5",
    "pp.open_dataset(3)": "dataset must be text or a path, not 3",
    "pp.open_dataset('mine', split=3)": "split must be text or None, not 3",
    "pp.load_classifier('small', 3)": "weights must be text or a path, not 3",
    "pp.load_classifier('small', 'random', num_classes='4')": "num_classes must be a whole number or None, not '4'",
    "pp.load_classifier('small', 'random', num_classes=0)": "num_classes must be at least 1, not 0",
    "pp.load_classifier('small', 'random', class_names={'a'})": "class_names must be a list of names or None, not {'a'",
    "pp.Ensemble([classifier, 3])": "members must be a list of at least one classifier, e.g. pp.Ensemble([first, secon",
    "pp.Ensemble([classifier, lambda images: images[:, 0, 0]])(images)": "agree in their classes: they have [3, 8]",
}

RIGHT = (
    "hash(pp.PatchThreat([8, numpy.int64(8)], [[2, 2]])) == hash(threat)",
    "pp.PatchThreat([8, numpy.int64(8)], [[2, 2]]) == threat",
    "not pp.MaskSet([8, 8], [pp.Rect(0, 0, 8, 8)]).uncovered(threat)",
    "pp.PatchThreat((8, 8), ((side, side) for side in (2, 5))).patch_sizes == ((2, 2), (5, 5))",
    "pp.PatchThreat((8, 8), numpy.array([[2, 2]])) == threat",
    "Plan(strategy=OwnCall()).describe()['strategy'] == 'OwnCall'",
    "require_defense(SimpleNamespace(**vars(own()) | {'engine': None})) is None",
    "Preprocessing(numpy.int64(8)) == Preprocessing(8)",
    "strategy(image_size=numpy.array([8, 8])).mask_sets == strategy().mask_sets",
    "len(pp.covering_masks(threat, per_axis=numpy.array([1, 2]))) == 2",
    "pp.open_dataset('fashion-mini', data_dir='x').split == 'test'",
    "hash(pp.MaskSet([8, 8], [pp.Rect(0, 0, 8, 8)])) == hash(pp.MaskSet((8, 8), (pp.Rect(0, 0, 8, 8),)))",
)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """The value or error of each expression, with jaxtyping switched off and batches of the usual size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patched.setattr("patchproof.masking._memory.MOST_ON_CPU", 512)
        names: dict[str, Any] = {}
        exec(SET_UP, names)
        return {words: outcome(words, names) for words in (*WRONG, *RIGHT)}


def outcome(words: str, names: dict[str, Any]) -> str:
    try:
        return str(eval(words, names))
    except PatchproofError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(said, wrong):
    assert WRONG[wrong] in said[wrong]


@pytest.mark.parametrize("right", RIGHT)
def test_sizes_may_come_as_lists_and_numpy_integers(said, right):
    assert said[right] == "True"
