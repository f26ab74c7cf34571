"""The settings of each command: one frozen dataclass per command, whose fields become flags and whose docstrings become
the help. Most fields are the library's own."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from patchproof.settings import DEFENSE_OPTIONS, AttackPlan, Engine, TrainingSettings
from patchproof.types import InputError, PrecisionChoice

FLAGS = {"per_axis": "masks"}
"""Flags whose name differs from the parameter they set."""

HEADINGS = {
    "ModelSettings": "Network",
    "DataSettings": "Images",
    "ThreatSettings": "Threat and defence",
    "Options": "Options of this defence",
    "AttackPlan": "Attack",
    "TrainingSettings": "Training",
    "": "Options of this command",
    "Engine": "Computation",
    "OutputSettings": "Run folder",
    "CommonSettings": "Common",
}
"""The class that declares a setting -> its heading in `--help`, in order; "" stands for any other class."""


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of every command."""

    config: Path | None = None
    """YAML file with any of these settings; flags override it."""
    json: bool = False
    """Print results as JSON on standard output, not as a table."""
    quiet: bool = False
    """Print results and errors only, without progress and notes."""
    verbose: bool = False
    """Also print which network and images were found, and what was measured."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which classifier, on which device."""

    model: str | None = None
    """Architecture: a timm name, one of the package's own (`small`, `bagnet9`, …; see `patchproof ls models`), or
    `file.py:factory` for a module of your own. Default: that of the checkpoint."""
    weights: str | None = None
    """Checkpoint folder, .safetensors or .pth file, hub id, timm tag, `pretrained`, `zoo`, `embedded`, `factory` (a
    module of your own as it is made) or `random`; several, separated by commas, form an ensemble that averages
    probabilities. Default: the weights that the model comes with; without --model, the embedded demonstration network
    (`train` requires one of the two flags)."""
    mirror: bool = False
    """Average the network's answers for the image and its mirror image: twice the passes."""
    drop_tokens: bool = False
    """For timm's ViTs: drop the tokens that a mask hides, and align masks with tokens, which takes about two thirds of
    the work. Checkpoints trained this way do it without the flag."""
    image_size: str | None = None
    """Size of the network input, `224` or `224x320` (height x width). Default: the size the model was built for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps` or `auto`; with `torchrun`, each process takes its own GPU."""
    seed: int = 0
    """Seed of all random numbers."""


@dataclass(frozen=True, kw_only=True)
class ThreatSettings:
    """Which patch, and which defence against it."""

    patch: str = "3%"
    """Largest patch: `3%` of the image, `39px` or `20x60px` (height x width); several sizes separated by commas."""
    patches: int = 1
    """Number of patches on one image: 1 or 2. Two patches need unions of masks and many more passes."""
    threat_space: Literal["input", "native"] = "input"
    """Where the patch is measured: at the network input, as in the literature, or on the original image."""
    defense: str = "patchcleanser"
    """Name of the defence (see `patchproof ls defenses`); its options become flags of this command."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which images."""

    dataset: str = "fashion-mini"
    """`imagenet`, `imagenette`, `cifar10`, `cifar100`, `svhn`, `fashion-mini`, or a folder of class folders."""
    data_dir: Path | None = None
    """Folder that holds the named data sets. Default: data."""
    split: str | None = None
    """Split of the data set. Default: `train` for training, else the evaluation split (for a folder `test`, or `val` if
    there is none)."""
    download: bool = False
    """Download the data set into --data-dir if it is missing and torchvision offers it."""
    limit: int | None = None
    """Use only this many images, spread evenly over the data set; the results are marked partial."""
    skip_bad: bool = False
    """Record unreadable images and continue, instead of stopping at the first one."""
    workers: int | None = None
    """Number of threads that decode images. Default: one per core, at most 16, shared among the machine's processes."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where a run is written."""

    output: Path | None = None
    """Folder of the run. Default: a folder below runs/, named after the settings."""
    resume: bool = False
    """Continue the run in --output."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Engine):
    """Arithmetic of the passes; by default the fastest that the device offers."""

    precision: PrecisionChoice = "auto"
    compile: bool | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class CertifySettings(CommonSettings, OutputSettings, DataSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Count the images that provably keep their label under any patch, and record each image."""

    dry_run: bool = False
    """Only estimate passes, time and memory from a few timed passes; write nothing."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings(AttackPlan, CertifySettings):
    """Certify images and attack them with patches: certified accuracy next to accuracy under attack."""


@dataclass(frozen=True, kw_only=True)
class PredictSettings(CommonSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Classify image files, or all images below folders, with a defence, and say which answers are certified."""

    like: Path | None = None
    """Folder of a certification: use its defence, masks, input size, precision and τ, and require its weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.like is None:
            return
        free = {f.name for kind in (CommonSettings, ModelSettings) for f in fields(kind)} | {"like", "batch_size"}
        for f in fields(self):
            if f.name not in free and getattr(self, f.name) != f.default:
                flag = FLAGS.get(f.name, f.name).replace("_", "-")
                raise InputError(f"--like takes the settings of the run: leave out --{flag}")


@dataclass(frozen=True, kw_only=True)
class BenchSettings(CommonSettings, DataSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Measure the speed of the bare network, of PatchCleanser's published loop, and of this package."""

    limit: int | None = 64
    """Number of images, spread evenly over the data set."""
    peer_images: int = 16
    """Number of images that the published loop certifies; 0 skips it."""
    surviving: bool = False
    """Shift the last layer so that every image survives to the last pair: disables early exit, to measure raw
    throughput."""
    reference: bool = False
    """Also certify every pair in float32, and compare the verdicts image by image."""
    scaling: bool = False
    """Also measure how cost grows with the masks per axis (2 to 8) and the number of images."""
    seconds: float = 1.0
    """Seconds for which each rate of the bare network is measured."""
    output: Path | None = None
    """JSON file to write everything measured to."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(CommonSettings, OutputSettings, TrainingSettings, DataSettings, ModelSettings):
    """Fine-tune a network on masked copies, and validate and save it after each epoch."""

    strategy: str = "greedy"
    loss: str = "cross-entropy"
    memory_tries: str = "2"
    teacher: str | None = None
    """Checkpoint folder of a network whose answers for the masked copies are learned too; several, separated by commas,
    form an ensemble. --mirror averages the answers with those for the mirrored copies."""
    recipe: str | None = None
    """A recipe (see `patchproof ls recipes`): a row of the paper's tables, a family of defences, or our own. Sets the
    options of training, and certifies the trained network."""
    validation: str | None = None
    """Folder of class folders, whose images choose the best epoch. Default: the split `val` (or `validation`,
    `valid`) of the data set, or `test` if there is none."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints, besides the one at the end of each epoch."""
    keep_decoded: bool = False
    """Decode each image once and keep it in memory: 0.15 MB per image at 224."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Where to send curves, besides log.jsonl."""
    dry_run: bool = False
    """Only estimate time and memory from a few timed steps; write nothing."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings(CommonSettings):
    """Fine-tune a small network on random and on worst-case masks, and compare how many images each can certify."""

    output: Path | None = None
    """Folder for everything the demo makes. Default: runs/demo, or the next free number."""
    epochs: int = 3
    """Passes over the 5,000 training images for each of the two strategies, after the common start."""
    images: int = 400
    """Number of test images to certify."""
    seed: int = 0
    """Seed of the first weights, the order of the images and the masks."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto`."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings(CommonSettings):
    """Show one run in depth, or several side by side: an HTML page that works offline, SVG and PNG figures, tables."""

    output: Path | None = None
    """Folder of the report. Default: `report` inside a single run; for several runs, runs/report-… ."""
    dataset: str | None = None
    """New location of the images, if they moved: a data set's name or a folder of class folders."""
    data_dir: Path | None = None
    """New folder of the named data sets."""
    images: int = 8
    """Number of certified images, and of failures, to show."""
    title: str | None = None
    """Heading of the page. Default: what the runs are about."""
    baseline: Path | None = None
    """The run that the others are compared with, image by image. Default: the first."""


@dataclass(frozen=True, kw_only=True)
class ExploreSettings(CommonSettings):
    """Look at single images in the browser: their two-mask table, and what the defence does with a patch on them."""

    patch: str | None = None
    """Largest patch, as for `certify`. Default: that of the run, or 3% for a checkpoint."""
    patches: int | None = None
    """Number of patches on one image, 1 or 2. Default: that of the run, or 1 for a checkpoint."""
    per_axis: int | None = None
    """Masks per axis, at most. Default: that of the run, or 3 for a checkpoint."""
    model: str | None = None
    """`file.py:factory`, if the network is a module of your own: the code of a run is executed only if you name it."""
    weights: str | None = None
    """New location of the run's weights, if they moved; they must have the sha256 in its manifest."""
    dataset: str | None = None
    """New location of the images: a data set's name or a folder of class folders. Default: that of the run."""
    data_dir: Path | None = None
    """New folder of the named data sets."""
    split: str | None = None
    """Split of the data set, for a checkpoint. Default: its evaluation split."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps` or `auto`."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but the default gives other machines access, without a password."""
    port: int | None = None
    """Port to listen on. Default: the first free one from 7860 on."""
    open: bool = False
    """Open the page in the browser."""


@dataclass(frozen=True, kw_only=True)
class LsSettings(CommonSettings):
    """List models, data sets, defences, masking strategies, recipes, or the runs below a folder."""


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(CommonSettings):
    """Check the installation: versions, devices, embedded data, extras, and one certification done in two ways."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps` or `auto`."""


@cache
def with_defense(kind: Any, name: str) -> Any:
    """The settings of a command together with the options of the defence of that name."""
    # Whoever adds a defence has imported the room of defences; importing it here would take seconds.
    loaded = sys.modules.get("patchproof.defenses")
    known = dict(DEFENSE_OPTIONS) if loaded is None else {key: own.options for key, own in loaded.DEFENSES.items()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
        raise InputError(f"unknown defence `{name}`; {hint}")
    made = type(kind.__name__, (kind, known[name]), {"__doc__": kind.__doc__, "__module__": __name__})
    return dataclass(frozen=True, kw_only=True)(made)


def part(settings: Any, kind: type[Any]) -> Any:
    """The part of the settings that is a `kind` of the library."""
    return kind(**chosen(settings, *(f.name for f in fields(kind))))


def chosen(settings: Any, *names: str) -> dict[str, Any]:
    """The settings of these names, as keyword arguments."""
    return {name: getattr(settings, name) for name in names}


COMMANDS: Mapping[str, tuple[type[Any], str]] = {
    "demo": (DemoSettings, "demo:demo"),
    "train": (TrainSettings, "_runs:train"),
    "certify": (CertifySettings, "_runs:evaluate"),
    "attack": (AttackSettings, "_runs:evaluate"),
    "predict": (PredictSettings, "_runs:predict"),
    "report": (ReportSettings, "pages:report"),
    "explore": (ExploreSettings, "pages:explore"),
    "bench": (BenchSettings, "bench:bench"),
    "ls": (LsSettings, "ls:ls"),
    "doctor": (DoctorSettings, "doctor:doctor"),
}
"""Name -> settings, and `module:function`, imported when the command is called: (arguments, settings) -> exit code."""

SETTINGS = {name: settings for name, (settings, _) in COMMANDS.items()}

LISTED = Literal["models", "datasets", "defenses", "strategies", "recipes", "runs"]
PLACE = "Run or checkpoint folder. Default: the embedded demonstration network and images."
PATTERN = "For models and recipes, a wildcard such as `vit*`; for runs, the folder to search (default: runs)."
ARGUMENTS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "predict": {"images": (list[Path], "Image files or folders; `-` reads one image from standard input.")},
    "report": {"runs": (list[Path], "Folders of `certify`, `attack` and `train` runs; they are not changed.")},
    "explore": {"place": (Path | None, PLACE)},
    "ls": {"what": (LISTED | None, "What to list. Default: runs."), "pattern": (str | None, PATTERN)},
}
"""Arguments of a command, without a flag: type and help."""


def owners(name: str) -> str | None:
    """The defences, or else the commands, that have a setting of this name, spelled as in flags and files."""

    def having(kinds: Mapping[str, type[Any]]) -> str:
        return ", ".join(n for n, kind in kinds.items() if name in {FLAGS.get(f.name, f.name) for f in fields(kind)})

    if defenses := having(DEFENSE_OPTIONS):
        defended = ", ".join(name for name, kind in SETTINGS.items() if hasattr(kind, "defense"))
        return f"the {'defences' if ',' in defenses else 'defence'} {defenses} of the commands {defended}"
    commands = having(SETTINGS)
    return f"the {'commands' if ',' in commands else 'command'} {commands}" if commands else None
