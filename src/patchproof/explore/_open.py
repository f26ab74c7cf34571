"""From a folder to an explorer: the classifier, defence and images of a run or a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
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
    Record,
    StoredCertification,
    find_images,
    network_remarks,
    preprocessing_for,
    read_run,
    stored_defense,
)
from patchproof.runs._reading import CHECKPOINTS, class_words, find_weights
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
    """What the folder holds: a certification or an attack with its images and records, a training, or a checkpoint.

    `patch`, `patches` and `per_axis` change the threat and the masks. `weights` names the run's, if they moved;
    `dataset` and `data_dir` its images. A checkpoint is defended by PatchCleanser, 3 masks per axis against a patch of
    3%, and shows the images of `dataset` and `split`, or those that its training was validated on.
    """
    source: ImageSource | str
    run = None if (models.settled(place) / "classifier.json").is_file() else read_run(place)
    if isinstance(run, StoredCertification):
        classifier = _classifier_of(run, model, weights).to(device).to(memory_format=torch.channels_last)
        built, notices, names = stored_defense(run, classifier), list(run.notices), run.class_names
        if (patch, patches, per_axis) != (None, None, None):
            if not isinstance(built, MaskedDefense):
                raise InputError(f"patch and masks can be changed for a defence with masks, and {built.name} has none")
            size = built.threat.image_size
            sizes = built.threat.patch_sizes if patch is None else parse_patches(patch, size)
            threat = PatchThreat(size, sizes, built.threat.patches if patches is None else patches)
            count = len(built.masks.axes[0]) if per_axis is None else per_axis
            built = replace(built, masks=masks_for(classifier, threat, per_axis=count), threat=threat)
            own = f"{'patch of ' * (run.patches == 1)}{run.patch_words}"
            notices.append(f"records are about the run's own {own} and {run.masks_words}")
        preprocessing = run.preprocessing or preprocessing_for(classifier, False, built.threat.image_size)
        source, records = find_images(run, dataset, data_dir), run.good
        about = f"{run.architecture} on {run.dataset}"
    else:
        checkpoint = next((place / name for name in CHECKPOINTS if run and (place / name).is_dir()), place)
        if run and checkpoint == place:
            raise InputError(f"{place} is a training run without a checkpoint; wait for its first, or resume it")
        if weights is not None:
            raise InputError("weights cannot be chosen for a checkpoint, which has its own; they are for a run")
        own = str(models.EMBEDDED if checkpoint == models.embedded_checkpoint() else checkpoint)
        classifier = load_classifier(model or str(architecture_of(own)), own)
        classifier = classifier.to(device).to(memory_format=torch.channels_last)
        sizes = parse_patches(patch or "3%", classifier.input_size)
        threat = PatchThreat(classifier.input_size, sizes, 1 if patches is None else patches)
        built = defense("patchcleanser", classifier, threat, per_axis=3 if per_axis is None else per_axis)
        names, notices = class_words(dict(enumerate(classifier.class_names or ()))), network_remarks(classifier)
        source, records = "No images are named as the dataset; drop in your own.", ()
        if dataset is not None:
            source = open_dataset(dataset, data_dir=data_dir, split=split)
        elif split is not None:
            raise InputError("split needs a dataset; name it too")
        else:
            with suppress(PatchproofError):
                source = find_images(read_run(checkpoint.resolve().parent), data_dir=data_dir)
        low_resolution, shown = False, "your own images"
        if not isinstance(source, str):
            low_resolution, shown = source.low_resolution, source.name
            classes = models.match_labels(source.class_names, classifier, source.name)
            records = tuple(Record(i, source.path(i), classes[label]) for i, label in enumerate(source.labels))
        preprocessing = preprocessing_for(classifier, low_resolution, threat.image_size)
        about = f"{classifier.architecture} on {shown}"
    if isinstance(source, str):  # why they are not found
        return Explorer(built, preprocessing, about, names, notices=(*notices, source))
    return Explorer(built, preprocessing, about, names, source, records, tuple(notices))


def _classifier_of(run: StoredCertification, model: str | None, weights: str | None) -> Any:
    """The classifier whose weights have the sha256 of the manifest."""
    wanted, tried = run.weights_sha256, []
    if wanted is None or run.image_size is None or not run.patch_sizes:
        raise CheckError(f"{run.folder} does not say which weights, patch and image size it certified")
    recorded = str(run.config.get("model") or run.architecture)
    if model is None and ":" in recorded:  # only the user may name code to run, not a folder that anybody wrote
        raise InputError(f"{run.folder} certified the factory {recorded}; give it as the model to have its code run")
    seed = run.config.get("seed")
    options: dict[str, Any] = {"input_size": run.image_size, "seed": seed if isinstance(seed, int) else 0}
    options["drop_tokens"] = run.config.get("drop_tokens") is True

    def load(name: str) -> models.ImageClassifier:
        classes = len(run.class_names) or None if name == "random" else None
        own = None if run.config.get("model") else architecture_of(name)
        return load_classifier(model or own or recorded, name, num_classes=classes, **options)

    places = [str(place) for place, _ in find_weights(run) if place.exists()]
    if "," in (run.weights or ""):  # several networks, each found as one is
        found_of = [
            [str(p) for p, _ in find_weights(replace(run, weights=w)) if p.exists()]
            for w in weight_names(str(run.weights))
        ]
        places = [",".join(found[0] for found in found_of)] if all(found_of) else []
    for name in [weights] if weights else dict.fromkeys([*places, *filter(None, [run.weights])]):
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
