"""Classifiers: [0, 1] images in, logits out; where their weights come from, and how they are kept."""

from patchproof.models._checkpoint import (
    checkpoint_architecture,
    checkpoint_extra,
    file_sha256,
    save_checkpoint,
    settled,
)
from patchproof.models._classifier import ImageClassifier
from patchproof.models._identity import checkpoint_sha256, classifier_summary, match_labels, weights_sha256
from patchproof.models._load import load_checkpoint, load_classifier, replace_head
from patchproof.models._state import write_state
from patchproof.models._timm import list_models, wordnet_words

__all__ = [
    "ImageClassifier",
    "checkpoint_architecture",
    "checkpoint_extra",
    "checkpoint_sha256",
    "classifier_summary",
    "file_sha256",
    "list_models",
    "load_checkpoint",
    "load_classifier",
    "match_labels",
    "replace_head",
    "save_checkpoint",
    "settled",
    "weights_sha256",
    "wordnet_words",
    "write_state",
]
