"""From settings to the things they name: device, classifier, data, threat, masks, defence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from patchproof.checks import DRIFT_IMAGES, FAST_COPIES, Drift, check_classifier
from patchproof.config import DataConfig, ModelConfig, TrainConfig, parse_batch_size, parse_patches, parse_size
from patchproof.data import (
    FolderSource,
    ImageSource,
    default_preprocessing,
    evenly_spread,
    iterate_batches,
    open_dataset,
)
from patchproof.defenses import PatchCleanser
from patchproof.geometry import MaskSet, PatchThreat, covering_masks, native_threat
from patchproof.masking import BLOCK, Engine, as_images
from patchproof.models import ImageClassifier, checkpoint_architecture, load_classifier
from patchproof.records import BEGIN_AGAIN
from patchproof.types import CheckError, InputError, PatchproofError, Preprocessing, Size

CHECKED_FLOATS = 1 << 29
"""Images to check the classifier on take at most so many numbers: two gigabytes."""


def choose_device(name: str, *, local_rank: int | None = None) -> torch.device:
    """The device asked for, if this machine has it; with several processes, each its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_rank is not None and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device must be cpu, cuda, cuda:1, mps or auto, not `{name}`") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"--device must be cpu, cuda, cuda:1, mps or auto, not `{name}`")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; try --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("--device mps: this machine has no MPS device; try --device cpu")
    return device


def choose_chunk(asked: str, image_size: Size, device: torch.device) -> int:
    """As many copies as keep the device busy without much memory: fewer when images are larger."""
    exact = parse_batch_size(asked)
    if exact is not None:
        return exact
    budget, most = (2_500_000, 512) if device.type == "cpu" else (80_000_000, 2048)
    fitting = max(1, min(most, budget // (3 * image_size[0] * image_size[1])))
    return 1 << (fitting.bit_length() - 1)  # a power of two, of which any part is whole


def images_at_once(chunk: int, device: torch.device) -> int:
    """Images of which the copies share chunks: enough to fill them while some images drop out, and on a slow CPU few
    enough that records come often."""
    return max(1, chunk // (2 if device.type == "cuda" else BLOCK))


def open_classifier(
    config: ModelConfig | TrainConfig, *, num_classes: int | None, class_names: Sequence[str] | None
) -> ImageClassifier:
    """The classifier of --model and --weights, at --image-size if given; fresh weights get these classes."""
    if config.weights == "" or config.model == "":
        raise InputError("--model and --weights cannot be empty; leave them out for the default")
    if not 0 <= config.seed < 2**63:
        raise InputError(f"--seed must be in [0, 2^63), not {config.seed}")
    model = config.model or (config.weights and checkpoint_architecture(Path(config.weights))) or "small"
    weights = config.weights or ("random" if model == "small" else "pretrained")
    fresh = weights == "random"
    return load_classifier(
        model,
        weights,
        num_classes=num_classes if fresh else None,
        class_names=class_names if fresh else None,
        input_size=parse_size(config.image_size, what="--image-size") if config.image_size else None,
        seed=config.seed,
    )


def choose_workers(config: DataConfig) -> int:
    """Threads that decode images."""
    if config.workers is None:
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return max(1, min(16, (os.cpu_count() or 2) // max(1, int(processes) if processes.isdigit() else 1)))
    if config.workers < 1:
        raise InputError(f"--workers must be at least 1, not {config.workers}")
    return config.workers


START_AGAIN = "put the files back as they were and begin again with another --output"


def open_source(config: DataConfig) -> ImageSource:
    choose_workers(config)
    return open_dataset(config.dataset, data_dir=config.data_dir, split=config.split, download=config.download)


def changes_since(listing_sha256: str, config: DataConfig, source: ImageSource) -> list[str]:
    """What to say if a folder of images lists other paths, labels or file sizes than it did; data in memory cannot."""
    if not isinstance(source, FolderSource):
        return []
    try:
        now = open_source(config).listing_sha256()
    except PatchproofError as error:
        return [f"the data set changed during the run ({error}); {START_AGAIN}"]
    return [] if now == listing_sha256 else [f"the data set changed during the run; {START_AGAIN}"]


def choose_preprocessing(classifier: ImageClassifier, *, low_resolution: bool) -> Preprocessing:
    return default_preprocessing(
        low_resolution,
        classifier.input_size,
        interpolation=classifier.interpolation,
        crop_pct=classifier.crop_pct,
    )


def choose_threat(
    config: ModelConfig, preprocessing: Preprocessing, input_size: Size, native: set[Size]
) -> PatchThreat:
    """𝓡 at the network input: as given, or as the footprint of a patch on images of the `native` sizes."""
    if config.threat_space == "input":
        return PatchThreat(input_size, parse_patches(config.patch, input_size))
    if not native:
        raise InputError("no image can be read, so there is no native size to measure the patch on")
    threats = [
        native_threat(native_size=size, patch_sizes=parse_patches(config.patch, size), preprocessing=preprocessing)
        for size in sorted(native)
    ]
    return PatchThreat(input_size, tuple(sorted({size for threat in threats for size in threat.patch_sizes})))


@dataclass(frozen=True)
class Setup:
    """Everything a certificate depends on."""

    classifier: ImageClassifier
    preprocessing: Preprocessing
    threat: PatchThreat
    masks: MaskSet
    engine: Engine
    device: torch.device
    exhaustive: bool = False

    @cached_property
    def defense(self) -> PatchCleanser:
        return PatchCleanser(self.classifier, self.masks, self.threat, engine=self.engine, exhaustive=self.exhaustive)

    def with_engine(self, **changes: Any) -> Setup:
        return replace(self, engine=replace(self.engine, **changes))


def stored_engine(manifest: Mapping[str, Any], *, chunk: int | None) -> dict[str, Any]:
    """τ, and unless it was asked for otherwise the batch size, of the run's first session."""
    try:
        tau, tau_fp32 = float(manifest["tau"]["fast"]), float(manifest["tau"]["fp32"])
        return {"tau": tau, "tau_fp32": tau_fp32, "chunk": chunk or int(manifest["batch_size"])}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckError(f"manifest.json lacks τ or the batch size ({error}); {BEGIN_AGAIN}") from error


def prepare(
    config: ModelConfig,
    classifier: ImageClassifier,
    *,
    low_resolution: bool,
    native_sizes: set[Size],
    exhaustive: bool = False,
    local_rank: int | None = None,
) -> Setup:
    device = choose_device(config.device, local_rank=local_rank)
    preprocessing = choose_preprocessing(classifier, low_resolution=low_resolution)
    threat = choose_threat(config, preprocessing, classifier.input_size, native_sizes)
    chunk = choose_chunk(config.batch_size, classifier.input_size, device)
    engine = Engine(chunk, config.precision, compile=config.compile)
    masks = covering_masks(threat, per_axis=config.masks)
    classifier = classifier.to(device).to(memory_format=torch.channels_last)
    return Setup(classifier, preprocessing, threat, masks, engine, device, exhaustive)


def checked(setup: Setup, pixels: torch.Tensor) -> tuple[Setup, Drift]:
    """Refuse a classifier no certificate can be about, and measure τ on these images."""
    engine, drift = check_classifier(
        setup.classifier,
        as_images(pixels, setup.device),
        setup.masks,
        num_classes=setup.classifier.num_classes,
        engine=setup.engine,
    )
    return replace(setup, engine=engine), drift


def checked_images(engine: Engine, image_size: Size) -> int:
    """How many images the classifier is checked on: many, if τ is for a fast precision, but no more than fit."""
    fitting = max(DRIFT_IMAGES, CHECKED_FLOATS // (3 * image_size[0] * image_size[1]))
    return DRIFT_IMAGES if engine.precision == "fp32" else min(FAST_COPIES, fitting)


def sample_pixels(source: ImageSource, setup: Setup, indices: Sequence[int]) -> torch.Tensor:
    """A few readable images, from all over the run, to check the classifier on."""
    wanted = checked_images(setup.engine, setup.masks.image_size)
    spread = [indices[i] for i in evenly_spread(wanted, len(indices))]
    for candidates in (spread, indices):
        for batch in iterate_batches(source, setup.preprocessing, candidates, batch_size=wanted, skip_bad=True):
            if len(batch.images):
                return batch.images
    raise InputError(f"none of the {len(indices)} images of {source.name} can be read")
