"""The commands: one frozen dataclass per command, which says what it does and what it can be told; most of its fields
are the library's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from patchproof.settings import DEFENSE_OPTIONS, AttackPlan, Engine, TrainingSettings
from patchproof.types import InputError, PrecisionChoice

FLAGS = {"per_axis": "masks"}
"""Flags that have another name than the parameter they set."""

GROUPS = {
    "ModelSettings": "Network",
    "ThreatSettings": "Threat and defence",
    "DataSettings": "Images",
    "OutputSettings": "Run folder",
    "Engine": "Computation",
    "TrainingSettings": "Training",
    "AttackPlan": "Attack",
    "CommonSettings": "Common",
}
"""Headings in `--help`."""


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every command can be told."""

    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""
    json: bool = False
    """Results as JSON on standard output instead of a table."""
    quiet: bool = False
    """Results and errors only: no progress, no notes."""
    verbose: bool = False
    """Also say which network and images were found, and what was measured."""
    debug: bool = False
    """Show where in the program an error arose (traceback)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which classifier, on which device."""

    model: str | None = None
    """Any timm name, one of the package's own (`small`, `bagnet9`, …: `patchproof ls models`), or `file.py:factory` for
    a module of your own; default: the checkpoint's."""
    weights: str | None = None
    """`pretrained`, a timm tag, a hub id, a .safetensors or .pth file, a checkpoint folder, `zoo`, `embedded`, or
    `random`; default: those that the model comes with (`small`: the embedded demonstration network); without --model:
    that network (`train` needs one named). Several with commas are an ensemble, which answers by the mean of their
    probabilities."""
    mirror: bool = False
    """Average the network with its answer for the mirrored image: twice the passes."""
    drop_tokens: bool = False
    """Of timm's ViTs: drop the tokens that a mask hides, and align masks to tokens; some two thirds of the work. A
    checkpoint that was trained so does it by itself."""
    image_size: str | None = None
    """Network input, `224` or `224x320` (height x width); default: what the model was built for."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`; with `torchrun` each process takes its own GPU."""
    seed: int = 0
    """For everything random."""


@dataclass(frozen=True, kw_only=True)
class ThreatSettings:
    """Against which patch, with which defence."""

    patch: str = "3%"
    """Largest patch: `3%`, `39px` or `20x60px` (height x width); several allowed sizes with commas."""
    patches: int = 1
    """Patches on the image at once: 1, or 2, which takes unions of masks and many more passes."""
    threat_space: Literal["input", "native"] = "input"
    """Where the patch is measured: at the network input, as in the literature, or on the original image."""
    defense: str = "patchcleanser"
    """Which defence (`patchproof ls defenses`); its options become flags of this command."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which images."""

    dataset: str = "fashion-mini"
    """`imagenet`, `imagenette`, `cifar10`, `cifar100`, `svhn`, `fashion-mini`, or a folder of class folders."""
    data_dir: Path | None = None
    """Folder of the named data sets."""
    split: str | None = None
    """Default: the data set's evaluation split, of a folder `test`, where there is none `val`; training: `train`."""
    download: bool = False
    """Fetch the data set into --data-dir if it is not there and torchvision can."""
    limit: int | None = None
    """Only so many images, spread evenly over the data set; the result is marked partial."""
    skip_bad: bool = False
    """Record images that cannot be read and go on, instead of stopping at the first."""
    workers: int | None = None
    """Threads that decode images; default: one per core, at most 16, shared among the processes of the machine."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where a run goes."""

    output: Path | None = None
    """Folder of the run; default: runs/ and a name made of the settings."""
    resume: bool = False
    """Go on with the run in --output."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Engine):
    """How passes are computed; on a GPU in whatever is fastest."""

    precision: PrecisionChoice = "auto"
    compile: bool | Literal["auto"] = "auto"
    """Compile the network for the fast passes: some seconds at the start, faster passes after. `auto` does so when much
    work lies ahead of a GPU; False never."""


@dataclass(frozen=True, kw_only=True)
class CertifySettings(CommonSettings, OutputSettings, DataSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Count the images that provably keep their label under any patch, and write one record for each."""

    dry_run: bool = False
    """Only estimate passes, time and memory, from a few timed passes; nothing is written."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings(AttackPlan, CertifySettings):
    """Certify images and attack them with patches: accuracy under attack beside the provable one."""


@dataclass(frozen=True, kw_only=True)
class PredictSettings(CommonSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Answer image files, or all images below folders, through a defence, and say which answers are certified."""

    like: Path | None = None
    """Folder of a certification: its defence, masks, precision and τ are used, and its weights required."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {f.name for kind in (CommonSettings, ModelSettings) for f in fields(kind)} | {"like", "batch_size"}
        for f in fields(self) if self.like else ():
            if f.name not in own and getattr(self, f.name) != f.default:
                flag = FLAGS.get(f.name, f.name).replace("_", "-")
                raise InputError(f"--like takes the settings of the run: leave out --{flag}")


@dataclass(frozen=True, kw_only=True)
class BenchSettings(CommonSettings, DataSettings, EngineSettings, ThreatSettings, ModelSettings):
    """Measure certification and prediction in one run: the bare network, a loop like the published one, and ours."""

    limit: int | None = 64
    """How many images, spread evenly over the data set."""
    peer_images: int = 16
    """How many of them the loop like the published one certifies; 0 leaves it out."""
    surviving: bool = False
    """Shift the last layer so that every image survives to the last pair: disables early exit, to measure raw
    throughput."""
    reference: bool = False
    """Also certify in float32 with every pair, and compare verdicts image by image."""
    scaling: bool = False
    """Also measure how cost grows with masks per axis (2 to 8) and with images."""
    seconds: float = 1.0
    """How long each rate of the bare network is measured."""
    output: Path | None = None
    """JSON file for everything measured."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(CommonSettings, OutputSettings, TrainingSettings, DataSettings, ModelSettings):
    """Fine-tune on masked copies, validate and save after each epoch; a killed run goes on with --resume."""

    strategy: str = "greedy"
    loss: str = "cross-entropy"
    memory_tries: str = "2"
    teacher: str | None = None
    """Checkpoint folder, with commas of an ensemble, whose answers for the masked copies are learned too; --mirror
    averages them with those for the mirrored copies."""
    recipe: str | None = None
    """A row of the paper's tables, a family of defences, or our own (`patchproof ls recipes`): sets what follows, and
    certifies at the end."""
    validation: str | None = None
    """Folder of class folders that choose the best epoch; default: the data set's split `val` (or `validation`,
    `valid`), where there is none `test`."""
    checkpoint_minutes: float = 10.0
    """Besides the end of each epoch, save a checkpoint this often."""
    keep_decoded: bool = False
    """Decode each image once and keep it in memory: 0.15 MB per image at 224."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Where to send curves, besides log.jsonl."""
    dry_run: bool = False
    """Only estimate time and memory, from a few timed steps; nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings(CommonSettings):
    """Fine-tune a small network on random and on worst-case masks, and count what each can prove."""

    output: Path | None = None
    """Folder for everything the demo makes; default: runs/demo, or the next free number."""
    epochs: int = 3
    """Passes over the 5,000 training images for each of the two strategies, after the common start."""
    images: int = 400
    """Test images to certify."""
    seed: int = 0
    """For the first weights, the order of the images and the masks."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings(CommonSettings):
    """Show one run in depth or several side by side: an HTML page without network, SVG and PNG, tables."""

    output: Path | None = None
    """Folder of the report; default: `report` inside a single run, for several runs/report-… ."""
    dataset: str | None = None
    """New location of the images, if they moved: a data set's name or a folder of class folders."""
    data_dir: Path | None = None
    """New folder of the named data sets."""
    images: int = 8
    """So many certified images and so many failures are shown."""
    title: str | None = None
    """Heading of the page; default: what the runs are about."""
    baseline: Path | None = None
    """The run that the others are compared with, image by image; default: the first."""


@dataclass(frozen=True, kw_only=True)
class ExploreSettings(CommonSettings):
    """Look at single images in the browser: their two-mask table, and what the defence does with a patch on them."""

    patch: str | None = None
    """Largest patch, as for certify; default: the run's, or 3% for a checkpoint."""
    patches: int | None = None
    """Patches on the image at once, 1 or 2; default: the run's, or 1 for a checkpoint."""
    per_axis: int | None = None
    """Masks per axis, at most; default: the run's, or 3 for a checkpoint."""
    model: str | None = None
    """Only for a module of your own: `file.py:factory`, so that its code is run."""
    weights: str | None = None
    """New location of the run's weights, if they moved; they must have the sha256 of its manifest."""
    dataset: str | None = None
    """New location of the images: a data set's name or a folder of class folders; default: the run's."""
    data_dir: Path | None = None
    """New folder of the named data sets."""
    split: str | None = None
    """For a checkpoint; default: the data set's own evaluation split."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than this one lets other machines in, without a password."""
    port: int | None = None
    """Port to listen on; default: the first free one from 7860 on."""
    open: bool = False
    """Open the page in the browser."""


@dataclass(frozen=True, kw_only=True)
class LsSettings(CommonSettings):
    """List models, data sets, defences, masking strategies, the paper's recipes, or the runs below a folder."""


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(CommonSettings):
    """Check the installation: versions, devices, embedded data, extras, and a certification done two ways."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`."""


@cache
def with_defense(kind: Any, name: str) -> Any:
    """The settings of a command with the options of that defence."""
    options = DEFENSE_OPTIONS.get(name)
    if options is None:
        from patchproof.defenses import DEFENSES

        if name not in DEFENSES:
            raise InputError(f"unknown defence `{name}`; known are {', '.join(DEFENSES)}")
        options = DEFENSES[name].options
    made = type(kind.__name__, (kind, options), {"__doc__": kind.__doc__, "__module__": __name__})
    return dataclass(frozen=True, kw_only=True)(made)


def part(settings: Any, kind: type[Any]) -> Any:
    """The part of the settings that is a `kind` of the library."""
    return kind(**chosen(settings, *(f.name for f in fields(kind))))


def chosen(settings: Any, *names: str) -> dict[str, Any]:
    """These settings as keyword arguments of the same names."""
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
"""Each command's settings, and the function of this package that does it, from its arguments and settings to an exit
code; its module is imported when it is called."""

SETTINGS = {name: settings for name, (settings, _) in COMMANDS.items()}

ARGUMENTS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "predict": {"images": (list[Path], "Image files or folders; `-` is one image from standard input.")},
    "report": {"runs": (list[Path], "Folders of `certify`, `attack` and `train` runs; they are read, not changed.")},
    "explore": {
        "place": (
            Path | None,
            "Folder of a `certify`, `attack` or `train` run, or a checkpoint folder; default: the embedded "
            "demonstration network with the embedded images.",
        )
    },
    "ls": {
        "what": (
            Literal["models", "datasets", "defenses", "strategies", "recipes", "runs"] | None,
            "What to list; default: runs.",
        ),
        "pattern": (
            str | None,
            "For models and recipes a wildcard such as `vit*`, for runs the folder to look below (default: runs).",
        ),
    },
}
"""What stands before the flags of a command: type and help."""


def commands_with(name: str) -> list[str]:
    """The commands that have a setting of this name, as flags and files spell it."""
    return [verb for verb, kind in SETTINGS.items() if name in {FLAGS.get(f.name, f.name) for f in fields(kind)}]
