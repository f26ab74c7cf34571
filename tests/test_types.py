"""What a caller gets who passes nonsense and has no type checker: an error that names it, never another answer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SET_UP = """
import numpy
import torch
import patchproof as pp
from patchproof.attacks import Misclassify
from patchproof.checks import check_classifier
from patchproof.masking import Runner, TwoMaskTable, Engine
from patchproof.training import Plan
from patchproof.types import InputError, Preprocessing

threat = pp.PatchThreat.square(image_size=(8, 8), pixels=2)
masks = pp.covering_masks(threat, per_axis=2)
images = torch.rand(4, 3, 8, 8)
labels = torch.zeros(4, dtype=torch.int64)
def classifier(images):
    return images.float().flatten(1)[:, :3]
def table(images, labels=None):
    return TwoMaskTable(Runner(classifier, Engine()), images, masks, labels)
def check(images):
    return check_classifier(classifier, images, masks, num_classes=3)
"""

WRONG = {
    "Preprocessing(resize=(8, 8), interpolation='lanczos')": "interpolation must be one of nearest, bilinear, bicubic",
    "Engine(precision='bfloat16')": "precision must be one of fp32, tf32, bf16, fp16, not 'bfloat16'",
    "Plan(schedule='cosin')": "schedule must be one of step, cosine, constant",
    "Plan(optimizer='adam')": "optimizer must be one of sgd, adamw",
    "Plan(augment='heavy')": "augment must be one of none, light",
    "Plan(precision='half')": "precision must be one of",
    "Misclassify('hinge')": "the loss must be one of cross-entropy, margin",
    "table((255 * images).byte())": "images must be floats in [0, 1]",
    "table(images[0])": "images must be floats in [0, 1] of shape (images, channels, height, width)",
    "table(images, labels[:1])": "labels must be a tensor of one int64 number for each of the 4 images",
    "table(images, labels.float())": "labels must be a tensor of one int64 number",
    "table(images, labels[:, None])": "labels must be a tensor of one int64 number",
    "table(images, [0, 0, 0, 0])": "labels must be a tensor of one int64 number for each of the 4 images, not list",
    "check(images[:0])": "give at least one",
    "check(torch.rand(2, 3, 9, 9))": "images must be (images, channels, height, width) of the masks' (8, 8), not",
    "check(torch.rand(3, 8, 8))": "images must be (images, channels, height, width) of the masks' (8, 8), not",
    "check(images + 1e-6 - images.max() + 1)": "images must be floats in [0, 1], not torch.float32 from",
    "check(255 * images)": "images must be floats in [0, 1], not torch.float32 from",
    "check((255 * images).byte())": "images must be floats in [0, 1], not torch.uint8 from",
    "check(images - torch.nan)": "images must be floats in [0, 1]",
    "pp.PatchThreat.square(image_size=(8, 8), pixels=2.5)": "a size is (height, width) in whole pixels",
    "pp.PatchThreat((8, 8, 3), ((2, 2),))": "a size is (height, width) in whole pixels",
    "pp.PatchThreat((8, 8), (2, 2))": "a size is (height, width) in whole pixels",
    "pp.PatchThreat((8, 8), None)": "the threat names no patch size",
    "Preprocessing(resize=[8, 8])": "resize and crop are tuples (height, width)",
    "Preprocessing(8, crop=[8, 8])": "resize and crop are tuples (height, width)",
    "Preprocessing(8, crop=(8, 8), cover=True)": "an image can cover a (height, width), not 8",
}

RIGHT = (
    "hash(pp.PatchThreat([8, numpy.int64(8)], [[2, 2]])) == hash(threat)",
    "pp.PatchThreat([8, numpy.int64(8)], [[2, 2]]) == threat",
    "not pp.MaskSet([8, 8], [pp.Rect(0, 0, 8, 8)]).uncovered(threat)",
    "hash(pp.MaskSet([8, 8], [pp.Rect(0, 0, 8, 8)])) == hash(pp.MaskSet((8, 8), (pp.Rect(0, 0, 8, 8),)))",
)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each expression gives or raises, in a Python where nothing checks the types."""
    lines = [
        SET_UP,
        "said = {}",
        f"for words in {[*WRONG, *RIGHT]}:",
        "    try: said[words] = str(eval(words))",
        "    except InputError as error: said[words] = str(error)",
        "    except Exception as error: said[words] = f'{type(error).__name__}: {error}'",
        "import json; print(json.dumps(said))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("wrong", WRONG)
def test_nonsense_is_named(said, wrong):
    assert WRONG[wrong] in said[wrong]


@pytest.mark.parametrize("right", RIGHT)
def test_sizes_may_come_as_lists_and_numpy_integers(said, right):
    assert said[right] == "True"
