"""Train and certify every defence on CIFAR-10 at its native 32 pixels: the runs behind docs/leaderboard.md.

    python scripts/leaderboard_runs.py --data CIFAR10 --output runs/leaderboard

CIFAR10 holds class folders in train/ and test/. What is there already is not done again; a killed run goes on. Each
defence has the backbone of its family and the same number of epochs; the numbers of the papers are in
results/leaderboard/literature.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchproof.cli import run

PATCHES = ("5px", "2px")


@dataclass(frozen=True)
class Training:
    """A network: flags of `patchproof train`; `start` is the training it begins with."""

    name: str
    flags: str
    epochs: int
    start: str | None = None


@dataclass(frozen=True)
class Certification:
    """Flags of `patchproof certify` on a network."""

    name: str
    network: str
    flags: str


def trainings(epochs: int) -> list[Training]:
    """Each has `epochs` in all: PatchCleanser's networks learn from Cutout first, and are then fine-tuned."""
    scratch = "--weights random --schedule cosine --augment shift --batch-size 512 --precision bf16"
    decay = "--weight-decay 5e-4"
    tuned = max(1, epochs // 6)
    tuning = "--schedule cosine --augment shift --batch-size 512 --precision bf16 --learning-rate 0.02 --mask-patch 5px"
    local = "--validate-with patchguard-bagnet --mask-patch 5px"
    return [
        Training("ablated", f"{scratch} {decay} --model resnet18_ablated --learning-rate 0.2 --strategy column4"
                 " --mask-patch 5px --validate-with derandomized-smoothing", epochs),
        Training("bagcert", f"{scratch} {decay} --model bagnet9 --learning-rate 0.1 --strategy none --loss bagcert"
                 " --mask-patch 5px --validate-with bagcert", epochs),
        Training("bagnet", f"{scratch} {decay} --model bagnet9 --learning-rate 0.2 --strategy none {local}", epochs),
        Training("ibp", f"{scratch} --model cnn_ibp --learning-rate 0.02 --strategy none --loss ibp"
                 " --mask-patch 5px --validate-with ibp", epochs),
        Training("plain", f"{scratch} {decay} --model resnet18_32 --learning-rate 0.2 --strategy cutout"
                 " --mask-patch 5px", epochs - tuned),
        Training("cutout", f"{tuning} --strategy cutout", tuned, start="plain"),
        Training("greedy", f"{tuning} --strategy greedy", tuned, start="plain"),
        Training("vit", f"{scratch} --model vit_patch4_32 --optimizer adamw --learning-rate 0.001 --weight-decay 0.05"
                 " --strategy column4 --drop-tokens --mask-patch 5px --validate-with derandomized-smoothing", epochs),
    ]  # fmt: skip


CERTIFICATIONS = [
    Certification("derandomized-smoothing", "ablated", "--defense derandomized-smoothing --band 4 --threshold 0.3"),
    Certification("patchguard-smoothing", "ablated", "--defense patchguard-smoothing --band 4 --threshold 0.3"),
    Certification("bagcert", "bagcert", "--defense bagcert"),
    Certification("clipped-bagnet", "bagnet", "--defense clipped-bagnet"),
    Certification("patchguard-bagnet", "bagnet", "--defense patchguard-bagnet"),
    Certification("ibp", "ibp", "--defense ibp"),
    Certification("patchcleanser-cutout", "cutout", "--masks 6"),
    Certification("patchcleanser-greedy", "greedy", "--masks 6"),
    Certification("alarm-greedy", "greedy", "--defense alarm --masks 6"),
    Certification("smoothed-vit", "vit", "--defense smoothed-vit --band 4 --stride 1"),
]


def merged(*words: str) -> list[str]:
    """Flags, each once: the last wins."""
    found: dict[str, list[str]] = {}
    for word in (word for part in words for word in part.split()):
        if word.startswith("--"):
            found[flag := word] = []
        else:
            found[flag].append(word)
    return [word for flag, values in found.items() for word in (flag, *values)]


def commands(data: Path, output: Path, epochs: int, more: str = "", also: str = "") -> Iterator[tuple[Path, list[str]]]:
    """The run folders and the commands that make them, in an order in which each has what it needs."""
    known = {training.name: training for training in trainings(epochs)}
    for training in known.values():
        folder = output / "train" / training.name
        words = f"{training.flags} --epochs {training.epochs} --dataset {data} --keep-decoded --output {folder}"
        if training.start is not None:
            words += f" --weights {output / 'train' / training.start / 'checkpoint-last'}"
        yield folder, ["train", *merged(words, more)]
        for one in CERTIFICATIONS:
            for patch in PATCHES if one.network == training.name else ():
                place = output / f"{one.name}-{patch}"
                words = f"--dataset {data} --split test --weights {folder / 'checkpoint-last'} --output {place}"
                yield place, ["certify", *merged(one.flags, words, f"--patch {patch}", also)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/leaderboard"))
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--only", nargs="+", help="names of networks")
    parser.add_argument("--training", default="", help='more flags of every training, e.g. "--limit 64 --device cpu"')
    parser.add_argument("--certifying", default="", help="more flags of every certification")
    parser.add_argument("--plan", action="store_true", help="only print the commands")
    arguments = parser.parse_args()
    wanted = arguments.only
    for folder, words in commands(
        arguments.data, arguments.output, arguments.epochs, arguments.training, arguments.certifying
    ):
        network = folder.name if words[0] == "train" else Path(words[words.index("--weights") + 1]).parent.name
        if wanted and network not in wanted:
            continue
        print("patchproof", *words, flush=True)
        results = folder / "results.json"
        done = results.exists() and json.loads(results.read_text("utf-8")).get("status") != "partial"
        if arguments.plan or done:
            continue
        started = time.monotonic()
        code = run([*words, *(["--resume"] if folder.exists() else [])])
        print(f"{folder.name}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
