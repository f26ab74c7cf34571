"""Which network this is, for manifests, and which of its outputs stands for which class of a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchproof.models._checkpoint import read_record, read_weights, settled
from patchproof.models._classifier import ImageClassifier
from patchproof.types import InputError


def weights_sha256(classifier: ImageClassifier) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor in the order of the names, mean and std included."""
    return _sha256(classifier.module.state_dict(), classifier.mean, classifier.std)


def checkpoint_sha256(folder: Path) -> str:
    """`weights_sha256` of the classifier in a checkpoint folder, which is not built for it."""
    place = settled(Path(folder))
    record = read_record(place)
    return _sha256(read_weights(place), torch.tensor(record["mean"]), torch.tensor(record["std"]))


def _sha256(state: Mapping[str, Tensor], mean: Tensor, std: Tensor) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted({**state, "(mean)": mean, "(std)": std}.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def classifier_summary(classifier: ImageClassifier) -> dict[str, Any]:
    """What a manifest says of a classifier."""
    return {
        "architecture": classifier.architecture,
        "source": classifier.source,
        "classes": classifier.num_classes,
        "class_names": None if classifier.class_names is None else list(classifier.class_names),
        "mean": list(classifier.fill),
        "std": list(classifier.scale),
        "input_size": list(classifier.input_size),
        "parameters": sum(parameter.numel() for parameter in classifier.parameters()),
    }


def match_labels(dataset_class_names: Sequence[str], classifier: ImageClassifier) -> list[int]:
    """For each class of the data set, the index of the classifier's output that stands for it."""
    if classifier.class_names is None:
        return _by_position(len(dataset_class_names), classifier)
    index = {name: position for position, name in enumerate(classifier.class_names)}
    strangers = [name for name in dataset_class_names if name not in index]
    if strangers:
        raise InputError(_strangers_message(strangers, dataset_class_names, classifier.class_names))
    return [index[name] for name in dataset_class_names]


def _by_position(count: int, classifier: ImageClassifier) -> list[int]:
    if count != classifier.num_classes:
        raise InputError(
            f"wrong number of classes: the data set has {count}, the classifier {classifier.num_classes} and no class "
            "names to match by; fine-tune it on this data set (`patchproof train`), or give its class names"
        )
    return list(range(count))


def _strangers_message(strangers: list[str], dataset: Sequence[str], known: Sequence[str]) -> str:
    unused = [name for name in known if name not in set(dataset)]
    return (
        f"{len(strangers)} of the data set's {len(dataset)} classes are not among the classifier's {len(known)}, "
        f"e.g. {', '.join(strangers[:3])}; the classifier has {', '.join(unused[:3]) or 'no others'}; "
        "fine-tune it on this data set (`patchproof train`), or name the class folders as the classifier does"
    )


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
