"""Explorers of run folders and checkpoints: their classifier, defence and images."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from patchproof import models
from patchproof.data import ImageSource, open_dataset
from patchproof.defenses import MaskedDefense, defense
from patchproof.explore._explorer import Explorer
from patchproof.geometry import PatchThreat, parse_patches
from patchproof.masking import assembled, masks_for, weight_names
from patchproof.models import architecture_of, load_classifier
from patchproof.runs import (
    CHECKPOINTS,
    Record,
    StoredCertification,
    class_words,
    find_images,
    find_weights,
    network_remarks,
    preprocessing_for,
    read_run,
    stored_defense,
)
from patchproof.types import CheckError, InputError, PatchproofError


def open_explorer(
    place: Path,
    *,
    device: torch.device | str = "cpu",
    patch: str | None = None,
    patches: int | None = None,
    per_axis: int | None = None,
    model: str | None = None,
    weights: str | None = None,
    dataset: str | None = None,
    data_dir: Path | None = None,
    split: str | None = None,
) -> Explorer:
    """Open a certification or an attack with its images and records, a training run, or a checkpoint.

    `patch`, `patches` and `per_axis` change the threat and the masks. `weights`, `dataset` and `data_dir` say where the
    weights and images of a run are, if they moved. A checkpoint is defended by PatchCleanser, by default with 3 masks
    per axis against a patch of 3%, and shows the images of `dataset` and `split`, or else its validation images.
    """
    run = None if (models.settled(place) / "classifier.json").is_file() else read_run(place)
    if isinstance(run, StoredCertification):
        classifier = classifier_of(run, model, weights).to(device).to(memory_format=torch.channels_last)
        return explorer_of_run(run, classifier, patch, patches, per_axis, find_images(run, dataset, data_dir))
    checkpoint = next((place / name for name in CHECKPOINTS if run and (place / name).is_dir()), place)
    if run and checkpoint == place:
        raise InputError(f"{place} is a training run without a checkpoint; wait for its first, or resume it")
    if weights is not None:
        raise InputError(
            "weights are for a run whose weights have moved; to explore a checkpoint, give its folder as the argument"
        )
    own = str(models.EMBEDDED if checkpoint == models.embedded_checkpoint() else checkpoint)
    classifier = load_classifier(model or str(architecture_of(own)), own)
    classifier = classifier.to(device).to(memory_format=torch.channels_last)
    sizes = parse_patches(patch or "3%", classifier.input_size)
    threat = PatchThreat(classifier.input_size, sizes, 1 if patches is None else patches)
    built = defense("patchcleanser", classifier, threat, per_axis=3 if per_axis is None else per_axis)
    source: ImageSource | str = "No images are named as the dataset; drop in your own."
    if dataset is not None:
        source = open_dataset(dataset, data_dir=data_dir, split=split)
    elif split is not None:
        raise InputError("split needs a dataset; name it too")
    else:
        with suppress(PatchproofError):
            source = find_images(read_run(checkpoint.resolve().parent), data_dir=data_dir)
    names, remarks = class_words(dict(enumerate(classifier.class_names or ()))), tuple(network_remarks(classifier))
    if isinstance(source, str):
        preprocessing = preprocessing_for(classifier, False, threat.image_size)
        about = f"{classifier.architecture} on your own images"
        return Explorer(built, preprocessing, about, names, notices=(*remarks, source))
    classes = models.match_labels(source.class_names, classifier, source.name)
    records = tuple(Record(i, source.path(i), classes[label]) for i, label in enumerate(source.labels))
    preprocessing = preprocessing_for(classifier, source.low_resolution, threat.image_size)
    about = f"{classifier.architecture} on {source.name}"
    return Explorer(built, preprocessing, about, names, source, records, remarks)


def explorer_of_run(
    run: StoredCertification,
    classifier: Any,
    patch: str | None,
    patches: int | None,
    per_axis: int | None,
    source: ImageSource | str,
) -> Explorer:
    """The run's defence, or one with another threat or other masks; `source` may say why there are no images."""
    built, notices = stored_defense(run, classifier), list(run.notices)
    if (patch, patches, per_axis) != (None, None, None):
        if not isinstance(built, MaskedDefense):
            raise InputError(f"patch and masks can be changed for a defence with masks, and {built.name} has none")
        old, size = built.threat, built.threat.image_size
        sizes = old.patch_sizes if patch is None else parse_patches(patch, size)
        threat = PatchThreat(size, sizes, old.patches if patches is None else patches)
        count = len(built.masks.axes[0]) if per_axis is None else per_axis
        built = replace(built, masks=masks_for(classifier, threat, per_axis=count), threat=threat)
        own = f"patch of {run.patch_words}" if run.patches == 1 else run.patch_words
        notices.append(f"records are about the run's own {own} and {run.masks_words}")
    preprocessing = run.preprocessing or preprocessing_for(classifier, False, built.threat.image_size)
    about = f"{run.architecture} on {run.dataset}"
    if isinstance(source, str):
        return Explorer(built, preprocessing, about, run.class_names, notices=(*notices, source))
    return Explorer(built, preprocessing, about, run.class_names, source, run.good, tuple(notices))


def classifier_of(run: StoredCertification, model: str | None, weights: str | None) -> Any:
    """The classifier whose weights have the sha256 of the manifest."""
    wanted, tried = run.weights_sha256, []
    if wanted is None or run.image_size is None or not run.patch_sizes:
        raise CheckError(f"{run.folder} does not say which weights, patch and image size it certified")
    recorded, seed = str(run.config.get("model") or run.architecture), run.config.get("seed")
    if model is None and ":" in recorded:  # only the user may name code to run, not a folder that anybody wrote
        raise InputError(f"{run.folder} certified the factory {recorded}; give it as the model to have its code run")
    options: dict[str, Any] = {"input_size": run.image_size, "seed": seed if isinstance(seed, int) else 0}
    options["drop_tokens"] = run.config.get("drop_tokens") is True

    def load(name: str) -> models.ImageClassifier:
        classes = len(run.class_names) or None if name == "random" else None
        own = None if model or run.config.get("model") else architecture_of(name)
        return load_classifier(model or own or recorded, name, num_classes=classes, **options)

    candidates, own = [weights], weight_names(run.weights) if run.weights else [None]
    if not weights:  # those of an ensemble are each found on their own
        places = [[str(p) for p, _ in find_weights(replace(run, weights=name)) if p.exists()] for name in own]
        candidates = [*map(",".join, product(*places)), run.weights]
    for name in filter(None, dict.fromkeys(candidates)):
        try:
            classifier = assembled(name, load, mirror=run.config.get("mirror") is True)
        except PatchproofError as error:
            tried.append(str(error))
            continue
        found = models.weights_sha256(classifier)
        if found == wanted:
            return classifier
        tried.append(f"{name} has the sha256 {str(found)[:12]}…")
    raise CheckError(
        f"the weights with the sha256 {wanted[:12]}… that {run.folder} certified are not found "
        f"({'; '.join(tried) or 'it names none'}); give the right ones, or explore a checkpoint by itself"
    )
