"""The images of a training by name: those to learn from, those that choose the best epoch, and those to test on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from patchproof.data import ImageSource, NoSplitError, open_dataset
from patchproof.types import InputError

OTHERS = "name other images as validation"


class TrainingImages(NamedTuple):
    """The images to learn from, other images that choose the best epoch, and those that `certify` tests, if known."""

    train: ImageSource
    validation: ImageSource
    test: ImageSource | None

    @property
    def words(self) -> str:
        """Which images train, choose and test, and whether the test is independent."""
        train, validation, test = (f"{images.name}, split {images.split}" if images else None for images in self)
        words = f"learns from {train}; the best epoch is chosen on {validation}"
        if self.test is None:
            return words + ": checkpoint-best is not independent of these"
        words, tested = words + "; ", self.test.listing_sha256()
        if self.validation.listing_sha256() == tested:
            return words + "these are also the images that certify tests: checkpoint-best is not independent of them"
        if self.train.listing_sha256() == tested:
            return words + "certify tests the images it learns from, unless it is given another split"
        return words + f"{test} is left to test"


def has_splits(dataset: str) -> bool:
    """True for a named data set and for a folder that has a folder `train`; False for one that holds the classes."""
    return not Path(dataset).is_dir() or (Path(dataset) / "train").is_dir()


def training_images(
    dataset: str,
    *,
    validation: str | None = None,
    data_dir: Path | None = None,
    split: str | None = None,
    download: bool = False,
) -> TrainingImages:
    """Open the images of a training; `validation` is a folder of class folders, by default the split `val`."""

    def opened(split: str | None) -> ImageSource:
        source = open_dataset(dataset, data_dir=data_dir, split=split, download=download)
        logging.getLogger("patchproof").debug(f"{len(source):,} images: {source.name}, split {source.split}")
        return source

    divided = has_splits(dataset)
    if not (split or validation or divided):
        raise InputError(f"{dataset} has no folder `train`; if it holds the classes itself, {OTHERS}")
    source = opened(split or ("train" if divided else None))
    try:
        held_out = open_dataset(validation) if validation else opened("val")
    except NoSplitError as error:
        raise InputError(f"{dataset} has no images to validate on, no split `val` or `test`; {OTHERS}") from error
    tested = opened(None) if divided else None
    if tested and not split and tested.split == source.split:  # there are no images to test on but those that choose
        tested = held_out
    here, there = (getattr(images, "root", None) for images in (source, held_out))
    if here is None or there is None:
        same = (source.name, source.split) == (held_out.name, held_out.split)
    else:
        same = Path(here).resolve() == Path(there).resolve()
    if same:
        raise InputError(f"the validation images are the training images; {OTHERS}")
    unknown = sorted(set(held_out.class_names) - set(source.class_names))
    if unknown:
        raise InputError(
            f"{len(unknown)} classes of the validation images are not among the training classes, e.g. {unknown[0]}; "
            f"{OTHERS}: of the same classes"
        )
    return TrainingImages(source, held_out, tested)
