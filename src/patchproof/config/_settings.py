"""What each command can be told: one frozen dataclass a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from patchproof.types import Precision

Switch = Annotated[bool, Parameter(negative=())]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which classifier, on which device, against which patch."""

    model: str | None = None
    """Any timm name, `small`, or `file.py:factory` for a module of your own; default: the checkpoint's, or `small`."""
    weights: str = "random"
    """`pretrained`, a timm tag, a hub id, a .safetensors or .pth file, a checkpoint folder, `zoo`, or `random`."""
    patch: str = "3%"
    """Largest patch: `3%`, `39px` or `20x60px` (height x width); several allowed sizes with commas."""
    masks: int = 3
    """Masks an axis, at most: 3 is quick, 6 certifies more images at some 15 times the cost."""
    threat_space: Literal["input", "native"] = "input"
    """Where the patch is measured: at the network input, as in the literature, or on the original image."""
    image_size: str | None = None
    """Network input, `224` or `224x320` (height x width); default: what the model was built for."""
    batch_size: str = "auto"
    """Masked copies in one forward pass, or `auto`."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`."""
    precision: Precision = "fp32"
    """Arithmetic of the fast passes; labels too close to call are decided again in float32."""
    compile: Switch = False
    """Compile the network for the fast passes: some seconds at the start, faster passes after."""
    seed: int = 0
    """For random weights."""
    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images."""

    dataset: str = "fashion-mini"
    """`imagenet`, `imagenette`, `cifar10`, `cifar100`, `svhn`, `fashion-mini`, or a folder of class folders."""
    data_dir: Path | None = None
    """Where the named data sets lie."""
    split: str | None = None
    """Default: the data set's own evaluation split."""
    download: Switch = False
    """Fetch the data set into --data-dir if it is not there and torchvision can."""
    limit: int | None = None
    """Only so many images, spread evenly over the data set; the result is marked partial."""
    skip_bad: Switch = False
    """Record images that cannot be read and go on, instead of stopping at the first."""
    workers: int | None = None
    """Threads that decode images; default: one a core, at most 16, shared among the processes of the machine."""


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(ModelConfig, DataConfig):
    """`patchproof certify`."""

    exhaustive: Switch = False
    """Evaluate every pair of masks, also of images already known to fail: the reference to compare with."""
    output: Path | None = None
    """Folder of the run; default: runs/ and a name made of the settings."""
    resume: Switch = False
    """Go on with the run in --output."""


@dataclass(frozen=True, kw_only=True)
class AttackConfig(CertifyConfig):
    """`patchproof attack`."""

    target: Literal["undefended", "defended", "both"] = "both"
    """What to attack: the classifier alone, the defence, or both."""
    steps: int = 40
    """Gradient steps for each start at each place."""
    restarts: int = 2
    """Starts at each place: the image's own pixels, then noise."""
    places: int = 4
    """Places of the patch that are tried on each image."""
    place_search: Literal["gradient", "grid", "exhaustive"] = "gradient"
    """Where to put it: where the input gradient is largest, evenly, or everywhere (then --places does not matter)."""
    step_size: float = 0.1
    """Largest change of a pixel in one step; falls to zero over the steps."""
    only_certified: Switch = False
    """Attack the defence on certified images alone: all effort goes to disproving the certificate."""
    seed: int = 0
    """For random weights, and for the noise that patches start from."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(ModelConfig):
    """`patchproof predict`."""

    json: Switch = False
    """One JSON object a line instead of a table."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ModelConfig, DataConfig):
    """`patchproof bench`."""

    limit: int | None = 64
    """How many images, spread evenly over the data set."""
    peer_images: int = 16
    """How many of them the loop like the published one certifies; 0 leaves it out."""
    surviving: Switch = False
    """Shift the last layer so that every image survives to the last pair: nothing is spared, throughput is bare."""
    reference: Switch = False
    """Also certify in float32 with every pair, and compare verdicts image by image."""
    scaling: Switch = False
    """Also measure how cost grows with masks an axis (2 to 8) and with images."""
    seconds: float = 1.0
    """How long each rate of the bare network is measured."""
    output: Path | None = None
    """JSON file for everything measured."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataConfig):
    """`patchproof train`."""

    recipe: str | None = None
    """A row of the paper's tables (`patchproof ls recipes`): sets what follows, and certifies at the end."""
    model: str | None = None
    """Any timm name, `small`, or `file.py:factory` for a module of your own; default: the checkpoint's, or `small`."""
    weights: str | None = None
    """Where to start: `pretrained`, a timm tag, a hub id, a file, a checkpoint folder, `zoo`, or `random`; default:
    `pretrained`, and `random` for `small`."""
    strategy: str = "greedy"
    """Which masked copies to learn from (`patchproof ls strategies`)."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: str = "64"
    """Images of one optimiser step, over all processes."""
    learning_rate: float | None = None
    """Default, as in the paper: 0.001 for transformers and ConvNeXt, 0.01 for the rest."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """`step` divides the learning rate by 10 after half of the epochs."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises from zero."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD is the paper's."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 0.0
    """L2 penalty (sgd) or decoupled decay (adamw)."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    ema: float = 0.0
    """Decay of a running average of the weights, e.g. 0.999, which is then validated and kept; 0 for none."""
    augment: Literal["none", "light"] = "none"
    """`light`: mirror, and crop to 50-100% of the area."""
    clean_copies: Switch = False
    """Learn from the unmasked images too."""
    head_only: Switch = False
    """Freeze all layers but the last."""
    accumulate: int = 1
    """Parts that each batch is cut into, to save memory."""
    image_size: str | None = None
    """Network input, `224` or `224x320` (height x width); default: what the model was built for."""
    mask_patch: str = "3%"
    """The training masks are the 3x3 and 6x6 sets of this patch."""
    validation: str | None = None
    """Folder of class folders to validate on; default: the data set's evaluation split."""
    validation_images: int = 500
    """How many images, always the same ones, are validated after each epoch (3x3 masks)."""
    checkpoint_minutes: float = 10.0
    """Besides the end of each epoch, save a checkpoint this often."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`; with `torchrun` or `accelerate launch`, each process takes its own GPU."""
    precision: Precision = "fp32"
    """Mixed precision of training and search."""
    compile: Switch = False
    """Compile the network for the search of `greedy` and `grid`: some seconds at the start, a faster search after."""
    keep_decoded: Switch = False
    """Decode each image once and keep it in memory: 0.15 MB an image at 224."""
    seed: int = 0
    """Everything random follows from it."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Where to send curves, besides log.jsonl."""
    output: Path | None = None
    """Folder of the run; default: runs/ and a name made of the settings."""
    resume: Switch = False
    """Go on with the run in --output."""
    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """`patchproof demo`."""

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
    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """`patchproof report`."""

    output: Path | None = None
    """Folder of the report; default: `report` inside a single run, for several runs/report-… ."""
    dataset: str | None = None
    """Where the run's images lie now, if not where they lay: a data set's name or a folder of class folders."""
    data_dir: Path | None = None
    """Where the named data sets lie now."""
    images: int = 8
    """So many certified images and so many failures are shown."""
    title: str | None = None
    """Heading of the page; default: what the runs are about."""
    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class ExploreConfig:
    """`patchproof explore`."""

    patch: str | None = None
    """Largest patch, as for certify; default: the run's, or 3% for a checkpoint."""
    masks: int | None = None
    """Masks an axis, at most; default: the run's, or 3 for a checkpoint."""
    model: str | None = None
    """Only for a module of your own: `file.py:factory`, so that its code is run."""
    weights: str | None = None
    """Where the run's weights are now, if not where they were; they must have the sha256 of its manifest."""
    dataset: str | None = None
    """Where the images lie now: a data set's name or a folder of class folders; default: the run's."""
    data_dir: Path | None = None
    """Where the named data sets lie now."""
    split: str | None = None
    """For a checkpoint; default: the data set's own evaluation split."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than this one lets other machines in, without a password."""
    port: int | None = None
    """Port to listen on; default: the first free one from 7860 on."""
    open: Switch = False
    """Open the page in the browser."""
    config: Path | None = None
    """A YAML file with any of these settings; flags win over it."""
