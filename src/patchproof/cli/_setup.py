"""From settings to the things they name: device, classifier, data, threat, defence."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from patchproof.cli._process import STOP
from patchproof.cli._settings import BenchSettings, CertifySettings, DataSettings, ModelSettings, part
from patchproof.data import ImageSource, open_dataset, require_workers
from patchproof.defenses import DEFENSES, defense
from patchproof.geometry import PatchThreat, native_threat, parse_patches, parse_size, size_words
from patchproof.masking import Engine, assembled, weight_names
from patchproof.models import EMBEDDED, ImageClassifier, architecture_of, known_weights, load_classifier
from patchproof.runs import local_rank, preprocessing_for
from patchproof.settings import AttackPlan
from patchproof.types import InputError, Size, require_free

LOGGER = logging.getLogger("patchproof")

UNFIT = re.compile(r"[^A-Za-z0-9._%-]+")
"""What stands in no name of a run."""


def choose_device(name: str) -> torch.device:
    """The device asked for, if this machine has it; with several processes, each its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    rank = local_rank()
    if name == "cuda" and rank is not None and counts["cuda"]:
        name = f"cuda:{rank % counts['cuda']}"
    kind, _, index = name.partition(":")
    if kind not in counts or not re.fullmatch(r"\w+(:\d+)?", name):
        raise InputError(f"--device must be cpu, cuda, cuda:1, mps or auto, not `{name}`")
    if int(index or 0) >= counts[kind]:
        raise InputError(f"--device {name}: this machine has {counts[kind]} {kind.upper()} devices; try --device cpu")
    return torch.device(name)


def named_network(settings: ModelSettings) -> tuple[str, str]:
    """--model and --weights, or their defaults, never random ones; nothing is loaded. Of several, the first model."""
    if settings.weights is None and settings.model is None:
        return "small", EMBEDDED
    names = weight_names(settings.weights) if settings.weights else []
    if len(names) > 1:
        return named_network(replace(settings, weights=names[0]))[0], ",".join(names)
    model = settings.model or architecture_of(str(settings.weights))
    if model is None:
        path = Path(str(settings.weights)).expanduser()
        if not path.exists() and len(path.parts) > 1 and not path.suffix:
            raise InputError(f"no such checkpoint folder: {path}; if it names other weights, say for which --model")
        last = path / "checkpoint-last"
        hint = f"did you mean {last}?" if last.is_dir() else "name the network it is for with --model"
        raise InputError(f"{settings.weights} is no checkpoint folder; {hint}")
    weights = settings.weights or known_weights(model)
    if weights is None:
        raise InputError(
            f"{model} has no weights of its own: give --weights a checkpoint folder or file, or `random` if you mean it"
        )
    return model, weights


def open_classifier(settings: ModelSettings, class_names: Sequence[str] | None = None) -> Any:
    """The classifier of --model and --weights, on --device, at --image-size if given; random weights get these
    classes. Several weights are an ensemble."""
    if not 0 <= settings.seed < 2**63:
        raise InputError(f"--seed must be in [0, 2^63), not {settings.seed}")
    device, size = choose_device(settings.device), parse_size(settings.image_size) if settings.image_size else None

    def load(name: str) -> ImageClassifier:
        model, weights = named_network(replace(settings, weights=name))
        names = class_names if weights == "random" else None
        options: dict[str, Any] = {"input_size": size, "seed": settings.seed, "drop_tokens": settings.drop_tokens}
        return load_classifier(model, weights, class_names=names, **options)

    classifier: Any = assembled(named_network(settings)[1], load, mirror=settings.mirror)
    LOGGER.debug(f"network {classifier.architecture} ({classifier.source}), on {device}")
    return classifier.to(device).to(memory_format=torch.channels_last)


def open_source(settings: DataSettings) -> ImageSource:
    require_workers(settings.workers)
    source = open_dataset(
        settings.dataset, data_dir=settings.data_dir, split=settings.split, download=settings.download
    )
    LOGGER.debug(f"{len(source):,} images of {len(source.class_names)} classes: {source.name}, split {source.split}")
    return source


def build_defense(settings: Any, classifier: Any, *, low_resolution: bool, native: Collection[Size] = ()) -> Any:
    """The defence against 𝓡 at the network input: as given, or as the footprint of a patch on images of the `native`
    sizes."""
    size, of = classifier.input_size, dict[Size, PatchThreat]()
    if settings.threat_space == "input":
        patches = parse_patches(settings.patch, size)
    elif not native:
        raise InputError("no image can be read, so there is no native size to measure the patch on")
    else:
        how = preprocessing_for(classifier, low_resolution, size)
        for n in sorted(native):
            sizes = parse_patches(settings.patch, n)
            try:
                of[n] = native_threat(native_size=n, patch_sizes=sizes, preprocessing=how)
            except InputError as error:
                raise InputError(f"an image has {size_words(n)} pixels: {error}, or leave it out") from error
        patches = tuple(sorted({patch for threat in of.values() for patch in threat.patch_sizes}))
    options = asdict(part(settings, DEFENSES[settings.defense].options))
    threat, engine = PatchThreat(size, patches, settings.patches), part(settings, Engine)
    if len({one.patch_sizes for one in of.values()}) > 1:
        whose = [next(n for n in of if of[n].largest[axis] == threat.largest[axis]) for axis in (0, 1)]
        images = " and ".join(map(size_words, dict.fromkeys(whose)))
        LOGGER.info(
            "footprints differ by the size of the image: one defence for all is built for the largest, "
            f"{size_words(threat.largest)} pixels, that of images of {images}"
        )
    return defense(settings.defense, classifier, threat, engine=engine, **options)


def open_defense(settings: CertifySettings | BenchSettings, source: ImageSource) -> Any:
    """The defended classifier of a certification or an attack."""
    classifier = open_classifier(settings, source.class_names)
    native = source.native_sizes() if settings.threat_space == "native" else ()
    return build_defense(settings, classifier, low_resolution=source.low_resolution, native=native)


def run_folder(command: str, settings: Any, source: ImageSource) -> Path:
    """--output, or below runs/ a name that tells apart what was asked for; refused where a run is that is not to be
    resumed."""
    model, weights = named_network(settings)
    name = f"{command}-{source.name}-{model}-"
    if command == "train":
        name += f"{settings.strategy}-seed{settings.seed}"
    else:
        masks = f"-{settings.per_axis}x{settings.per_axis}" if hasattr(settings, "per_axis") else ""
        kind = "" if settings.defense == "patchcleanser" else f"-{settings.defense}"
        kind += f"-{settings.patches}patches" if settings.patches > 1 else ""
        space = "-native" if settings.threat_space == "native" else ""
        paths, same = map(Path, weight_names(weights)), UNFIT.sub("_", f"train-{source.name}-{model}-")
        trained = re.compile(r"checkpoint-(best|last)")  # every training has one, so its folder is named, too
        names = (f"{p.parent.name}-{p.name}".removeprefix(same) if trained.fullmatch(p.name) else p.name for p in paths)
        networks = "+".join(names) + ("-mirror" if settings.mirror else "")
        name += f"{networks}-{settings.patch.replace(' ', '')}{masks}{kind}{space}"
    if command == "attack":
        plain, plan = AttackPlan(), part(settings, AttackPlan)
        name += f"-{plan.steps}steps-{plan.restarts}restarts-{plan.places}places"
        others = ("target", "place_search", "step_size", "only_certified", "seed")
        changed = [other for other in others if getattr(plan, other) != getattr(plain, other)]
        name += "".join(f"-{other}-{getattr(plan, other)}" for other in changed)
    name += f"-{settings.image_size}px" if settings.image_size else ""
    name += f"-{settings.split}" if settings.split else ""
    name += f"-{settings.limit}images" if settings.limit else ""
    path = STOP.folder = settings.output or Path("runs") / UNFIT.sub("_", name)
    if not local_rank() and not settings.dry_run:
        require_free(path, resume=settings.resume)
        if settings.resume and not (path / "manifest.json").exists():
            LOGGER.info(f"{path} holds no run to go on with: begins a new one")
    return path
