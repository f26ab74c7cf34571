"""The time of training with each strategy, as a share of the time with the first one named.

    python benchmarks/strategy_time.py --model tf_efficientnet_lite0 --device cuda --precision bf16 --compile

Two epochs on a few random images are trained with each strategy, alternately and twice. A step of the first epoch
counts once, one of the second for all later epochs, because `memory` searches in full when it first sees an image.
Times are medians over steps, which leaves out compiling and recording, since these happen once.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import DEVICE, machine, parser, write

import patchproof as pp
from patchproof.models import load_classifier

STEPS, EPOCHS = 16, 10
"""Steps per epoch that are timed, and epochs of the training whose time is computed."""


def step_seconds(strategy: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a step in the first epoch, and in the second."""
    classifier = load_classifier(arguments.model, "random", num_classes=10).to(arguments.device)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(STEPS * arguments.batch_size, 3, *classifier.input_size, generator=generator)
    plan = pp.Plan(
        strategy=strategy,
        epochs=2,
        batch_size=arguments.batch_size,
        learning_rate=1e-6,
        precision=arguments.precision,
        compile=arguments.compile,
    )
    seconds: list[list[float]] = [[], []]
    data = [(image, number % 10) for number, image in enumerate(images)]
    pp.train(classifier, data, plan, keep_decoded=True, on_step=lambda step: seconds[step.epoch].append(step.seconds))
    first, later = (statistics.median(steps[len(steps) // 4 :]) for steps in seconds)
    return first, later


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--strategies", nargs="+", default=["greedy", "memory"])
    flags.add_argument("--model", default="tf_efficientnet_lite0")
    flags.add_argument("--batch-size", type=int, default=64)
    flags.add_argument("--device", default=DEVICE)
    flags.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    flags.add_argument("--compile", action="store_true")
    arguments = flags.parse_args()
    turns = [{name: step_seconds(name, arguments) for name in arguments.strategies} for _ in range(2)]
    rows: list[dict[str, Any]] = []
    for name in arguments.strategies:
        first, later = (statistics.mean(turn[name][part] for turn in turns) for part in (0, 1))
        total = first + (EPOCHS - 1) * later
        rows.append({"strategy": name, "first_epoch": first, "later_epochs": later, "sum_over_epochs": total})
        share = rows[-1]["share"] = total / rows[0]["sum_over_epochs"]
        print(f"{name}: {1000 * first:.1f} ms per step, later {1000 * later:.1f} ms; {share:.2f} of the time")
    settings = {name: getattr(arguments, name) for name in ("model", "batch_size", "precision", "compile")}
    write({**machine(arguments.device), **settings, "epochs": EPOCHS, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
