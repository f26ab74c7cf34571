"""Which network this is, for manifests, and which of its outputs stands for which class of a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchproof.models._checkpoint import read_record, read_weights, settled
from patchproof.models._classifier import ImageClassifier
from patchproof.types import Classifier, InputError


def weights_sha256(classifier: Classifier) -> str | None:
    """SHA-256 over name, dtype, shape and bytes of every tensor in the order of the names, mean and std included.

    None where a classifier is no nn.Module, so that its weights are unknown.
    """
    if isinstance(classifier, ImageClassifier):
        return _sha256(classifier.module.state_dict() | {"(mean)": classifier.mean, "(std)": classifier.std})
    members = getattr(classifier, "members", None)  # an ensemble's
    if members is not None:
        parts = [weights_sha256(member) for member in members]
        return None if None in parts else hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return _sha256(classifier.state_dict()) if isinstance(classifier, nn.Module) else None


def checkpoint_sha256(folder: Path) -> str:
    """`weights_sha256` of the classifier in a checkpoint folder, which is not built for it."""
    place = settled(Path(folder))
    record = read_record(place)
    mean, std = torch.tensor(record["mean"]), torch.tensor(record["std"])
    return _sha256(read_weights(place) | {"(mean)": mean, "(std)": std})


def _sha256(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def classifier_summary(classifier: Classifier) -> dict[str, Any]:
    """What a manifest says of a classifier; None where it does not say."""

    def listed(name: str) -> list[Any] | None:
        value = getattr(classifier, name, None)
        return None if value is None else list(value)

    parameters = classifier.parameters() if isinstance(classifier, nn.Module) else ()
    return {
        "architecture": getattr(classifier, "architecture", type(classifier).__name__),
        "source": getattr(classifier, "source", None),
        "classes": getattr(classifier, "num_classes", None),
        "class_names": listed("class_names"),
        "mean": listed("shift"),
        "std": listed("scale"),
        "fill": listed("fill"),
        "input_size": listed("input_size"),
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def match_labels(dataset_class_names: Sequence[str], classifier: Classifier) -> list[int]:
    """For each class of the data set, the index of the classifier's output that stands for it.

    Where one of the two has no class names, the classes are matched by their position.
    """
    names, known = dataset_class_names, getattr(classifier, "class_names", None)
    count = getattr(classifier, "num_classes", None)
    if not names:
        return list(range(count or 0))
    if known is None and count in (None, len(names)):
        return list(range(len(names)))
    if known is None:
        raise InputError(
            f"wrong number of classes: the data set has {len(names)}, the classifier {count} and no class names to "
            "match by; fine-tune it on this data set (`patchproof train`), or give its class names"
        )
    index = {name: position for position, name in enumerate(known)}
    unknown = [name for name in names if name not in index]
    if unknown:
        unused = [name for name in known if name not in set(names)]
        raise InputError(
            f"{len(unknown)} of the data set's {len(names)} classes are not among the classifier's {len(known)}, "
            f"e.g. {', '.join(unknown[:3])}; the classifier has {', '.join(unused[:3]) or 'no others'}; "
            "fine-tune it on this data set (`patchproof train`), or name the class folders as the classifier does"
        )
    return [index[name] for name in names]
