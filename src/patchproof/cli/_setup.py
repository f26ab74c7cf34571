"""From settings to what they name: device, classifier, data, defence, and the folder of the run."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from patchproof.cli._process import STOP
from patchproof.cli._settings import BenchSettings, CertifySettings, DataSettings, ModelSettings, chosen, part
from patchproof.data import ImageSource, open_dataset, require_workers
from patchproof.defenses import DEFENSES, defense
from patchproof.geometry import PatchThreat, parse_patches, parse_size
from patchproof.machine import require_free
from patchproof.masking import Engine, assembled, weight_names
from patchproof.models import EMBEDDED, SUFFIXES, ImageClassifier, architecture_of, known_weights, load_classifier
from patchproof.runs import (
    choose_device,
    footprint_threat,
    local_rank,
    preprocessing_for,
    read_manifest,
    require_command,
)
from patchproof.settings import AttackPlan
from patchproof.types import InputError, Size

LOGGER = logging.getLogger("patchproof")

UNFIT = re.compile(r"[^A-Za-z0-9._%-]+")
"""Characters that are replaced in the name of a run folder."""


def named_network(settings: ModelSettings) -> tuple[str, str]:
    """Model and weights, as given or by default (never random ones); for an ensemble, the model of its first member."""
    if settings.weights is None and settings.model is None:
        return "small", EMBEDDED
    names = weight_names(settings.weights) if settings.weights else []
    if len(names) > 1:
        return named_network(replace(settings, weights=names[0]))[0], ",".join(names)
    model = settings.model or architecture_of(str(settings.weights))
    if model is None:
        path = Path(str(settings.weights)).expanduser()
        if not path.exists() and path.suffix.lower() in SUFFIXES:
            raise InputError(f"no such weight file: {path}")
        if not path.exists() and len(path.parts) > 1 and not path.suffix:
            raise InputError(f"no such checkpoint folder: {path}; if it names other weights, add --model")
        last = path / "checkpoint-last"
        hint = f"did you mean {last}?" if last.is_dir() else "name the network it is for with --model"
        if (path / "records.jsonl").exists():
            hint = "it is the folder of a certification; give the weights that it certified"
        raise InputError(f"{settings.weights} is no checkpoint folder; {hint}")
    weights = settings.weights or known_weights(model)
    if weights is None:
        raise InputError(
            f"{model} has no weights of its own: give --weights a checkpoint folder or file, or `random` if you mean it"
        )
    return model, weights


def open_classifier(settings: ModelSettings, class_names: Sequence[str] | None = None) -> Any:
    """The classifier of --model and --weights, or their ensemble; random weights are made for these classes."""
    if not 0 <= settings.seed < 2**63:
        raise InputError(f"--seed must be in [0, 2^63), not {settings.seed}")
    device = choose_device(settings.device)
    size = parse_size(settings.image_size) if settings.image_size else None

    def load(name: str) -> ImageClassifier:
        model, weights = named_network(replace(settings, weights=name))
        return load_classifier(
            model,
            weights,
            class_names=class_names if weights == "random" else None,
            input_size=size,
            seed=settings.seed,
            drop_tokens=settings.drop_tokens,
        )

    classifier: Any = assembled(named_network(settings)[1], load, mirror=settings.mirror)
    LOGGER.debug(f"network {classifier.architecture} ({classifier.source}), on {device}")
    return classifier.to(device).to(memory_format=torch.channels_last)


def open_source(settings: DataSettings) -> ImageSource:
    require_workers(settings.workers)
    source = open_dataset(settings.dataset, **chosen(settings, "data_dir", "split", "download"))
    LOGGER.debug(f"{len(source):,} images of {len(source.class_names)} classes: {source.name}, split {source.split}")
    return source


def build_defense(
    settings: Any, classifier: Any, *, native_sizes: Mapping[Size, str] | None = None, low_resolution: bool = False
) -> Any:
    """The defence of the settings; a patch on the original image is one on images of the `native_sizes`."""
    size = classifier.input_size
    if settings.threat_space == "native":
        preprocessing = preprocessing_for(classifier, low_resolution, size)
        threat = footprint_threat(settings.patch, native_sizes or {}, preprocessing, patches=settings.patches)
    else:
        threat = PatchThreat(size, parse_patches(settings.patch, size), settings.patches)
    options = asdict(part(settings, DEFENSES[settings.defense].options))
    return defense(settings.defense, classifier, threat, engine=part(settings, Engine), **options)


def open_defense(settings: CertifySettings | BenchSettings, source: ImageSource) -> Any:
    """The defended classifier for these images."""
    classifier = open_classifier(settings, source.class_names)
    native = source.native_sizes() if settings.threat_space == "native" else None
    return build_defense(settings, classifier, native_sizes=native, low_resolution=source.low_resolution)


def run_folder(command: str, settings: Any, source: ImageSource) -> Path:
    """The folder of --output, or one below runs/ whose name says which settings were chosen."""
    model, weights = named_network(settings)
    parts = [command, source.name, model]
    if command == "train":
        parts += [settings.strategy, f"seed{settings.seed}"]
    else:
        parts += [_weights_words(weights, f"train-{source.name}-{model}-") + ("-mirror" if settings.mirror else "")]
        parts += [settings.patch.replace(" ", "")]
        parts += [f"{settings.per_axis}x{settings.per_axis}"] if hasattr(settings, "per_axis") else []
        parts += [settings.defense] if settings.defense != "patchcleanser" else []
        parts += [f"{settings.patches}patches"] if settings.patches > 1 else []
        parts += ["native"] if settings.threat_space == "native" else []
    if command == "attack":
        plan = part(settings, AttackPlan)
        parts += [f"{plan.steps}steps", f"{plan.restarts}restarts", f"{plan.places}places"]
        for name in ("target", "place_search", "step_size", "only_certified", "seed"):
            if getattr(plan, name) != getattr(AttackPlan, name):
                parts += [name, str(getattr(plan, name))]
    parts += [f"{settings.image_size}px"] if settings.image_size else []
    parts += [settings.split] if settings.split else []
    parts += [f"{settings.limit}images"] if settings.limit else []
    path = STOP.folder = settings.output or Path("runs") / UNFIT.sub("_", "-".join(parts))
    if not settings.dry_run and not local_rank():
        require_free(path, resume=settings.resume)  # before a network is loaded
        manifest = path / "manifest.json"
        if settings.resume and manifest.exists():
            require_command(read_manifest(manifest), command, where=path)
        elif settings.resume:
            LOGGER.info(f"{path} holds no run to go on with: begins a new one")
    return path


def _weights_words(weights: str, training: str) -> str:
    """The weights in the name of a run; a checkpoint with the folder of its training, without its prefix `training`."""
    words = []
    for path in map(Path, weight_names(weights)):
        if path.name in ("checkpoint-best", "checkpoint-last"):
            folder = path.parent.name.removeprefix(UNFIT.sub("_", training))
            words.append(f"{folder}-{path.name}")
        else:
            words.append(path.name)
    return "+".join(words)
