"""`patchproof explore`: single images of a run, or of one's own, in the browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from cyclopts import Parameter
from rich.markup import escape

from patchproof.cli._setup import Setup, checked, choose_chunk, choose_device, open_classifier, prepare, sample_pixels
from patchproof.cli._terminal import Console
from patchproof.config import ExploreConfig, ModelConfig, parse_patches
from patchproof.data import ImageSource, open_dataset
from patchproof.geometry import PatchThreat, covering_masks
from patchproof.masking import Engine
from patchproof.models import ImageClassifier, match_labels, settled, weights_sha256
from patchproof.records import read_json
from patchproof.types import CheckError, InputError

if TYPE_CHECKING:
    from patchproof.explore import Explorer, Images
    from patchproof.report import CertifyRun

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CHECKPOINTS = ("checkpoint-best", "checkpoint-last")


def explore(place: Path, /, *, config: Annotated[ExploreConfig, Parameter(name="*")] = ExploreConfig()) -> int:
    """Look at single images in the browser: their two-mask table, and what the defence does with a patch on them.

    Parameters
    ----------
    place
        Folder of a `certify` or `train` run, or a checkpoint folder.
    """
    from patchproof.explore import require_gradio, serve

    require_gradio()
    if config.port is not None and not 1 <= config.port <= 65535:
        raise InputError(f"--port must be from 1 to 65535, not {config.port}")
    console = Console()
    explorer = open_explorer(place, config)
    for text in explorer.notices:
        console.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True, highlight=False)
    if config.host not in LOOPBACK:
        console.print(
            f"[yellow]warning:[/] listening on {escape(config.host)}: whoever can reach this machine can use the page, "
            "without a password, and have their files decoded here",
            soft_wrap=True,
            highlight=False,
        )
    with serve(explorer, host=config.host, port=config.port, open_browser=config.open) as url:
        console.print(f"explore: {escape(url)} (Ctrl-C ends it)", soft_wrap=True, highlight=False)
        wait_for_ctrl_c()
    return 0


def wait_for_ctrl_c() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def open_explorer(place: Path, config: ExploreConfig) -> Explorer:
    """What the folder holds: a certification with its images, or a checkpoint with those of --dataset."""
    from patchproof.report import load_runs

    if (settled(place) / "classifier.json").is_file():
        return of_checkpoint(place, config)
    certified, trained = load_runs([place])
    if certified:
        return of_run(certified[0], config)
    found = [trained[0].folder / name for name in CHECKPOINTS if (trained[0].folder / name).is_dir()]
    if not found:
        raise InputError(f"{place} is a training run without a checkpoint; wait for its first, or resume it")
    return of_checkpoint(found[0], config)


def of_run(run: CertifyRun, config: ExploreConfig) -> Explorer:
    """The classifier, masks and preprocessing of the run, and its images with their records."""
    from patchproof.explore import Choice, Images
    from patchproof.report import open_images

    facts = run.facts
    if facts.masks is None or facts.preprocessing is None or not facts.patch_sizes or facts.weights_sha256 is None:
        raise CheckError(
            f"the manifest of {run.folder} lacks masks, patch, preprocessing or weights; explore the checkpoint itself"
        )
    device = choose_device(config.device)
    threat, masks = PatchThreat(facts.masks.image_size, facts.patch_sizes), facts.masks
    notices = list(run.notices)
    if config.patch is not None or config.masks is not None:
        threat = replace(threat, patch_sizes=parse_patches(config.patch, threat.image_size)) if config.patch else threat
        masks = covering_masks(threat, per_axis=config.masks or facts.axes or 3)
        notices.append(f"records are about the run's own {facts.patch_words} patch and {facts.masks_words}")
    classifier = run_classifier(run, config).to(device).to(memory_format=torch.channels_last)
    engine = Engine(choose_chunk("auto", threat.image_size, device), tau_fp32=facts.tau or 0.0)
    setup = Setup(classifier, facts.preprocessing, threat, masks, engine, device)
    offered = open_images(facts, dataset=config.dataset, data_dir=config.data_dir)
    if isinstance(offered, str):
        return finished(setup, facts.dataset, None, [*notices, offered])
    choices = tuple(Choice(record.index, record.label, record) for record in run.good)
    return finished(setup, facts.dataset, Images(offered.source, choices), notices)


def run_classifier(run: CertifyRun, config: ExploreConfig) -> ImageClassifier:
    """The classifier whose weights have the sha256 of the manifest."""
    manifest = read_json(run.folder / "manifest.json")
    tried = []
    for weights in candidates(run, config):
        classifier = load(weights, model_of(run, config), manifest)
        found = weights_sha256(classifier)
        if found == run.facts.weights_sha256:
            return classifier
        tried.append(f"{weights} has the sha256 {found[:12]}…")
    reason = "; ".join(tried) or f"{run.facts.weights} is not there"
    wanted = str(run.facts.weights_sha256)[:12]
    raise CheckError(
        f"the weights are not those that {run.folder} certified (sha256 {wanted}…): {reason}; "
        "name the right ones with --weights, or explore a checkpoint by itself"
    )


def model_of(run: CertifyRun, config: ExploreConfig) -> str | None:
    """The architecture. A factory is code, which only the user may name, not a folder that anybody may have written."""
    recorded = run.facts.config.get("model")
    if config.model is None and isinstance(recorded, str) and ":" in recorded:
        raise InputError(f"{run.folder} certified the factory {recorded}; name it with --model to have its code run")
    return config.model or (recorded if isinstance(recorded, str) else None)


def candidates(run: CertifyRun, config: ExploreConfig) -> Iterator[str]:
    """Where the weights may be: where they were, seen from here or from above the run, and beside the run."""
    if config.weights is not None:
        yield config.weights
        return
    folder = run.folder.resolve()
    named = run.facts.weights or "random"
    places = [parent / Path(named).expanduser() for parent in (Path.cwd(), *folder.parents)]
    existing = [str(place) for place in places if place.exists()]
    beside = [str(folder.parent / name) for name in CHECKPOINTS if (folder.parent / name).is_dir()]
    is_path = bool(existing) or "/" in named or Path(named).suffix in (".safetensors", ".pth", ".pt")
    yield from dict.fromkeys([*existing, *beside] if is_path else [named])


def load(weights: str, model: str | None, manifest: Mapping[str, Any]) -> ImageClassifier:
    settings, summary = manifest.get("config") or {}, manifest.get("model") or {}
    names = summary.get("class_names")
    size, seed = settings.get("image_size"), settings.get("seed")
    asked = ModelConfig(
        model=model,
        weights=weights,
        image_size=size if isinstance(size, str) else None,
        seed=seed if isinstance(seed, int) else 0,
    )
    return open_classifier(asked, num_classes=summary.get("classes"), class_names=names)


def of_checkpoint(folder: Path, config: ExploreConfig) -> Explorer:
    """A checkpoint against --patch and --masks, with the images of --dataset or of its training."""
    from patchproof.explore import Choice, Images

    if config.weights is not None:
        raise InputError("--weights says where a certify run's weights are now; a checkpoint folder has its own")
    asked = ModelConfig(
        model=config.model,
        weights=str(folder),
        patch=config.patch or "3%",
        masks=3 if config.masks is None else config.masks,
        device=config.device,
    )
    classifier = open_classifier(asked, num_classes=None, class_names=None)
    source, classes, notices = checkpoint_images(folder, classifier, config)
    setup = prepare(asked, classifier, low_resolution=bool(source and source.low_resolution), native_sizes=set())
    if source is None:
        return finished(setup, "images of your own", None, notices)
    choices = tuple(Choice(index, classes[label]) for index, label in enumerate(source.labels))
    return finished(setup, source.name, Images(source, choices), notices)


def checkpoint_images(
    folder: Path, classifier: ImageClassifier, config: ExploreConfig
) -> tuple[ImageSource | None, list[int], list[str]]:
    """The images named, or those that the checkpoint was trained to classify where they are still to be found."""
    trained = training_settings(folder.resolve().parent)
    name = config.dataset or trained.get("dataset")
    if not isinstance(name, str):
        return None, [], ["no images are named (--dataset); drop in your own"]
    place = config.data_dir or (Path(trained["data_dir"]) if isinstance(trained.get("data_dir"), str) else None)
    try:
        source = open_dataset(name, data_dir=place, split=config.split)
        return source, match_labels(source.class_names, classifier), []
    except InputError as error:
        if config.dataset is not None:
            raise
        return None, [], [f"the images of the training cannot be shown: {error}"]


def training_settings(folder: Path) -> Mapping[str, Any]:
    """The settings of the training run in this folder; none where there is no such run."""
    path = folder / "manifest.json"
    manifest = read_json(path) if path.is_file() else {}
    settings = manifest.get("config")
    return settings if manifest.get("command") == "train" and isinstance(settings, dict) else {}


def finished(setup: Setup, data: str, images: Images | None, notices: list[str]) -> Explorer:
    """The explorer, once the classifier is known to answer one image in one way on this machine."""
    from patchproof.explore import Explorer
    from patchproof.report import class_words

    stored = setup.engine.tau_fp32
    setup, _ = checked(setup, some_pixels(setup, images))
    setup = setup.with_engine(tau_fp32=max(stored, setup.engine.tau_fp32))
    classifier = setup.classifier
    words = class_words(dict(enumerate(classifier.class_names or ())))
    sizes = " or ".join(f"{h}×{w}" for h, w in setup.threat.patch_sizes)
    height, width = setup.masks.image_size
    rows, columns = setup.masks.axes
    title = (
        f"{classifier.architecture} on {data}: one patch of {sizes} pixels anywhere on {height}×{width}, "
        f"{len(rows)}×{len(columns)} masks, τ = {setup.engine.tau_fp32:.2g}"
    )
    return Explorer(
        setup.defense,
        setup.preprocessing,
        tuple(words.get(label, f"class {label}") for label in range(classifier.num_classes)),
        title,
        images,
        tuple(notices),
        setup.device,
    )


def some_pixels(setup: Setup, images: Images | None) -> torch.Tensor:
    """A few images on offer to check the classifier on; noise where there are none."""
    if images is not None and images.choices:
        return sample_pixels(images.source, setup, [choice.index for choice in images.choices])
    shape = 8, len(setup.classifier.fill), *setup.masks.image_size
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
