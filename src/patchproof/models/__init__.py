"""Classifiers: [0, 1] images in, logits out; where their weights come from, and how they are kept."""

from patchproof.models._bounds import margin_bounds, passable_layers
from patchproof.models._build import list_models, wordnet_words
from patchproof.models._classifier import (
    Core,
    ImageClassifier,
    adopt,
    classifier_summary,
    mask_colour,
    match_labels,
    only_prepares,
    rewrap,
    weights_sha256,
)
from patchproof.models._files import (
    SEAL,
    checkpoint_architecture,
    checkpoint_sha256,
    failure,
    file_sha256,
    is_whole,
    save_checkpoint,
    sealed,
    settled,
    write_state,
)
from patchproof.models._load import (
    EMBEDDED,
    EMBEDDED_SOURCE,
    architecture_of,
    embedded_checkpoint,
    known_weights,
    load_checkpoint,
    load_classifier,
    replace_head,
)
from patchproof.models._networks import NETWORKS
from patchproof.models._twin import fingerprint, rounded

__all__ = [
    "EMBEDDED",
    "EMBEDDED_SOURCE",
    "NETWORKS",
    "SEAL",
    "Core",
    "ImageClassifier",
    "adopt",
    "architecture_of",
    "checkpoint_architecture",
    "checkpoint_sha256",
    "classifier_summary",
    "embedded_checkpoint",
    "failure",
    "file_sha256",
    "fingerprint",
    "is_whole",
    "known_weights",
    "list_models",
    "load_checkpoint",
    "load_classifier",
    "margin_bounds",
    "mask_colour",
    "match_labels",
    "only_prepares",
    "passable_layers",
    "replace_head",
    "rewrap",
    "rounded",
    "save_checkpoint",
    "sealed",
    "settled",
    "weights_sha256",
    "wordnet_words",
    "write_state",
]
