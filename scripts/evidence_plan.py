"""What there is to run for the evidence under results/: commands, where they write, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from patchproof.geometry import PatchThreat, covering_masks
from patchproof.training import STRATEGIES, masking_strategy

TOO_DEAR = ("greedy6x6", "grid6x6")
"""Searches through all 6×6 masks: for one epoch only."""

PAPER = [name for name in STRATEGIES if name not in ("memory", "column4", "row4", "block12")]
CHOSEN = [name for name in PAPER if name not in TOO_DEAR]
"""The paper's others."""

TWO_COPIES = ("rand", "gutout", "greedy")
PASSES_OF_AN_UPDATE = 8
"""A training pass and its way back, counted in inference passes."""

PASSES_OF_A_WAY_BACK = 3
"""That of Grad-CAM or of an attack, which ask for no gradient of the weights."""

FAST = ("--precision", "fp16", "--workers", "8")


@dataclass(frozen=True)
class Step:
    """One command, where it writes, and about how many inference passes it takes."""

    name: str
    words: tuple[str, ...]
    passes: int
    after: str | None = None
    """The training whose network this step certifies, or goes on from."""

    @property
    def limit(self) -> int | None:
        """How many images it asks for; None for all."""
        return int(self.words[self.words.index("--limit") + 1]) if "--limit" in self.words else None

    def command(self, data: Path, runs: Path) -> list[str]:
        words = [w.replace("DATA", str(data)).replace("RUNS", str(runs)) for w in self.words]
        return [*words, "--output", str(runs / self.name), "--resume"]


def training(
    name: str, dataset: str, strategy: str, seed: int, *, images: int, epochs: int, extra: tuple[str, ...] = ()
) -> Step:
    words = f"train --model tf_efficientnet_lite0 --weights zoo --dataset DATA/{dataset} --strategy {strategy}"
    words += f" --seed {seed} --epochs {epochs} --precision bf16 --keep-decoded --workers 16 --validation-images 100"
    searching = ("--compile",) if strategy.startswith(("greedy", "grid")) else ()
    passes = images * epochs * passes_of_training_on_one(strategy, side=224)
    return Step(name, (*words.split(), *extra, *searching), passes)


def passes_of_training_on_one(strategy: str, *, side: int) -> int:
    """For one image: the strategy's search, and the update."""
    copies = 2 if strategy in TWO_COPIES else 1
    search = masking_strategy(strategy, image_size=(side, side), generator=torch.Generator())
    return search.forwards + PASSES_OF_A_WAY_BACK * search.backwards + PASSES_OF_AN_UPDATE * copies


def certification(
    name: str,
    weights: str,
    dataset: str,
    patch: str,
    masks: int,
    *,
    images: int,
    limit: int | None = None,
    extra: tuple[str, ...] = (),
) -> Step:
    pixels = {"1%": 23, "2%": 32, "3%": 39}.get(patch) or int(patch.removesuffix("px"))
    threat = PatchThreat.square(image_size=(224, 224), pixels=pixels)
    pairs = len(covering_masks(threat, per_axis=masks).unions)
    count = min(images, limit or images)
    words: tuple[str, ...] = (
        "certify",
        *weights.split(),
        "--dataset",
        f"DATA/{dataset}",
        "--patch",
        patch,
        "--masks",
        str(masks),
        *FAST,
    )
    words += ("--limit", str(limit)) if limit else ()
    words += ("--compile",) if pairs * count > 500_000 else ()
    target = f"{name}/certify-{patch.replace('%', 'percent')}-{masks}x{masks}"
    trained = f"{'/'.join(name.split('/')[:2])}/train" if "RUNS/" in weights else None
    return Step(target, (*words, *extra), pairs * count, after=trained)


def imagenette() -> Iterator[Step]:
    """Every strategy, `cutout` and `greedy` with three seeds, certified at 3%; most telling first."""
    chosen = [("cutout", 0), ("greedy", 0), ("rand", 0), ("none", 0)]
    chosen += [("cutout", 1), ("greedy", 1), ("cutout", 2), ("greedy", 2)]
    chosen += [(s, 0) for s in CHOSEN if s not in ("cutout", "greedy", "rand", "none")]
    for strategy, seed in chosen:
        name = f"imagenette/{strategy}-seed{seed}"
        yield training(f"{name}/train", "imagenette2-160", strategy, seed, images=9_469, epochs=10)
        yield nette(strategy, seed, "3%", 3)
        yield nette(strategy, seed, "3%", 6)


def imagenette_more() -> Iterator[Step]:
    """The other patches, and the curve over masks per axis for `cutout` and `greedy`."""
    for strategy in CHOSEN:
        for patch in ("2%", "1%"):
            yield nette(strategy, 0, patch, 3)
    for strategy in ("cutout", "greedy"):
        for masks in (2, 4, 5):
            yield nette(strategy, 0, "3%", masks)
    for strategy in CHOSEN:
        for patch in ("2%", "1%"):
            yield nette(strategy, 0, patch, 6)


def imagenette_one_epoch() -> Iterator[Step]:
    """The searches through all 6×6 masks, which are dear, and beside them every other strategy; two
    more seeds of `rand` and `greedy` show how much one epoch leaves to chance."""
    for strategy in (*TOO_DEAR, "greedy", *(s for s in CHOSEN if s != "greedy")):
        yield from one_epoch(strategy, 0, (3, 6))
    for seed in (1, 2):
        for strategy in ("rand", "greedy"):
            yield from one_epoch(strategy, seed, (3,))


def one_epoch(strategy: str, seed: int, mask_sets: tuple[int, ...]) -> Iterator[Step]:
    """A network, and its certificates at 3%."""
    experiment = "imagenette-one-epoch"
    name = f"{experiment}/{strategy}-seed{seed}/train"
    yield training(name, "imagenette2-160", strategy, seed, images=9_469, epochs=1)
    for masks in mask_sets:
        yield nette(strategy, seed, "3%", masks, experiment=experiment)


def nette(strategy: str, seed: int, patch: str, masks: int, *, experiment: str = "imagenette") -> Step:
    """All images with few masks; with more every second one, which keeps the interval under ±2 points above 73%, where
    all are after ten epochs."""
    name = f"{experiment}/{strategy}-seed{seed}"
    limit = None if masks <= 3 or (experiment, strategy, patch) == ("imagenette", "none", "3%") else 1_963
    weights = f"--weights RUNS/{name}/train/checkpoint-last"
    return certification(name, weights, "imagenette2-160", patch, masks, images=3_925, limit=limit)


def cifar10() -> Iterator[Step]:
    """Patches of 14 and 35 pixels of the enlarged image, and native ones of 2×2 and 5×5 for the same networks."""
    for strategy in ("cutout", "rand", "greedy"):
        name = f"cifar10/{strategy}-seed0"
        yield training(f"{name}/train", "cifar10", strategy, 0, images=20_000, epochs=5, extra=("--image-size", "224"))
        weights = f"--weights RUNS/{name}/train/checkpoint-last"
        native = ("--threat-space", "native")
        for masks in (3, 6):
            for patch in ("35px", "14px"):
                yield certification(name, weights, "cifar10", patch, masks, images=10_000, limit=2_500)
            for patch in ("5px", "2px"):
                yield certification(
                    f"{name}/native", weights, "cifar10", patch, masks, images=10_000, limit=2_500, extra=native
                )


def imagenet() -> Iterator[Step]:
    """The pretrained network as it is, on a thousand validation images."""
    weights = "--model tf_efficientnet_lite0 --weights zoo"
    for masks in (2, 3, 4, 5, 6):
        for patch in ("3%", "2%", "1%"):
            yield certification("imagenet/zoo", weights, "imagenet-val-1000", patch, masks, images=1_000)


def fashion() -> Iterator[Step]:
    """Every strategy of the paper on the network and the data of `make demo`: no GPU, no download. Three seeds with 3×3
    masks, one with 6×6; the dearest search has one seed and comes last."""
    for seed in (0, 1, 2):
        start = f"fashion/start-seed{seed}/train"
        yield Step(
            start, small_training("none", seed, "random", epochs=2, learning_rate=0.1), 5_000 * 2 * PASSES_OF_AN_UPDATE
        )
        for strategy in [s for s in PAPER if s != "grid6x6"]:
            yield from fashion_network(strategy, seed, sets=(3,) if seed else (3, 6))
    yield from fashion_network("grid6x6", 0, sets=(3, 6))


def fashion_network(strategy: str, seed: int, *, sets: tuple[int, ...]) -> Iterator[Step]:
    """As in `make demo`, certified on all 1,000 test images."""
    start, name, epochs = f"fashion/start-seed{seed}/train", f"fashion/{strategy}-seed{seed}", 3
    words = small_training(strategy, seed, f"RUNS/{start}/checkpoint-last", epochs=epochs, learning_rate=0.05)
    passes = 5_000 * epochs * passes_of_training_on_one(strategy, side=28)
    yield Step(f"{name}/train", words, passes, after=start)
    threat = PatchThreat.square(image_size=(28, 28), pixels=5)
    for masks in sets:
        certify = f"certify --weights RUNS/{name}/train/checkpoint-last --patch 5px --masks {masks} --device cpu"
        passes = 1_000 * len(covering_masks(threat, per_axis=masks).unions)
        yield Step(f"{name}/certify-5px-{masks}x{masks}", tuple(certify.split()), passes, after=f"{name}/train")


def small_training(strategy: str, seed: int, weights: str, *, epochs: int, learning_rate: float) -> tuple[str, ...]:
    words = (
        f"train --model small --weights {weights} --strategy {strategy} --seed {seed} --epochs {epochs} --limit 5000"
    )
    words += f" --learning-rate {learning_rate} --schedule cosine --warmup-epochs 0.5 --weight-decay 5e-4"
    return tuple(f"{words} --validation-images 200 --device cpu".split())


def attacked() -> Iterator[Step]:
    """Both bounds for `cutout` and `greedy`: a hundred images, attacked with and without the defence."""
    for strategy in ("cutout", "greedy"):
        name = f"imagenette/{strategy}-seed0"
        words: tuple[str, ...] = (
            "attack",
            "--weights",
            f"RUNS/{name}/train/checkpoint-last",
            "--dataset",
            "DATA/imagenette2-160",
        )
        words += ("--patch", "3%", "--masks", "3", "--limit", "100", "--compile", *FAST)
        copies = 2 * 40 * 4 * 2 * 12  # objectives, steps, places, starts, copies that show the patch
        passes = 100 * copies * (1 + PASSES_OF_A_WAY_BACK)
        yield Step(f"{name}/attack-3percent-3x3", words, passes, after=f"{name}/train")


EXPERIMENTS = {
    "imagenette": imagenette,
    "imagenette-more": imagenette_more,
    "imagenette-one-epoch": imagenette_one_epoch,
    "cifar10": cifar10,
    "imagenet": imagenet,
    "attacked": attacked,
    "fashion": fashion,
}
