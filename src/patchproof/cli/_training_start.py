"""What a training starts from: images to learn from, others to validate on, and a classifier for their classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from patchproof.cli._setup import open_classifier, open_source
from patchproof.config import TrainConfig
from patchproof.data import ImageSource, open_dataset
from patchproof.models import ImageClassifier, replace_head
from patchproof.types import InputError


def open_sources(config: TrainConfig) -> tuple[ImageSource, ImageSource]:
    """The images to learn from and, never the same, those to validate on."""
    require_splits(config)
    split = config.split or (None if config.validation else "train")
    source = open_dataset(config.dataset, data_dir=config.data_dir, split=split, download=config.download)
    held_out = open_dataset(config.validation) if config.validation else open_source(replace(config, split=None))
    if same_images(source, held_out):
        raise InputError("the validation images are the training images; name others with --validation FOLDER")
    unknown = sorted(set(held_out.class_names) - set(source.class_names))
    if unknown:
        raise InputError(f"the validation images have {len(unknown)} classes to learn nothing about, e.g. {unknown[0]}")
    return source, held_out


def same_images(one: ImageSource, other: ImageSource) -> bool:
    """The same folder, or for data sets in memory the same split."""
    roots = [getattr(source, "root", None) for source in (one, other)]
    if None in roots:
        return (one.name, one.split) == (other.name, other.split)
    return Path(str(roots[0])).resolve() == Path(str(roots[1])).resolve()


def require_splits(config: TrainConfig) -> None:
    folder = Path(config.dataset)
    if config.split or config.validation or not folder.is_dir() or (folder / "train").is_dir():
        return
    raise InputError(
        f"{folder} has no folder `train`; if it holds the classes itself, name others with --validation FOLDER"
    )


def open_start(config: TrainConfig, source: ImageSource) -> ImageClassifier:
    return open_classifier(config, num_classes=len(source.class_names), class_names=source.class_names)


def with_classes_of(source: ImageSource, classifier: ImageClassifier, *, seed: int) -> ImageClassifier:
    """The classifier itself if it answers exactly the data set's classes, in any order; else with a new last layer."""
    if sorted(classifier.class_names or ()) == sorted(source.class_names):
        return classifier
    return replace_head(classifier, len(source.class_names), source.class_names, seed=seed)
