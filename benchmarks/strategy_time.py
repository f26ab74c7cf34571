"""What a training costs with each strategy, as a share of what it costs with the first one named.

    python benchmarks/strategy_time.py --model tf_efficientnet_lite0 --device cuda --precision bf16 --compile

Two epochs on a few random images with each strategy in turn, twice. A step of the first epoch counts once and one of
the second for all epochs that follow: `memory` searches in full when it first sees an image. Times are the medians of
steps, so that compiling and recording, which happen once, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import patchproof as pp
from patchproof.models import load_classifier
from patchproof.runs import device_name, versions


def step_seconds(strategy: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a step in the first epoch, and in the second."""
    classifier = load_classifier(arguments.model, arguments.weights, num_classes=10).to(arguments.device)
    generator = torch.Generator().manual_seed(0)
    count = arguments.steps * arguments.batch_size
    images = torch.rand(count, 3, *classifier.input_size, generator=generator)
    plan = pp.Plan(
        strategy=strategy,
        memory_tries=arguments.memory_tries,
        epochs=2,
        batch_size=arguments.batch_size,
        learning_rate=1e-6,
        precision=arguments.precision,
        compile=arguments.compile,
    )
    found: list[list[float]] = [[], []]
    data = [(image, number % 10) for number, image in enumerate(images)]
    pp.train(
        classifier, data, plan, keep_decoded=True, on_step=lambda report: found[report.epoch].append(report.seconds)
    )
    first, later = (statistics.median(seconds[len(seconds) // 4 :]) for seconds in found)
    return first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["greedy", "memory"])
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--memory-tries", default="2")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=10, help="of the training that is counted")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    turns = [{name: step_seconds(name, arguments) for name in arguments.strategies} for _ in range(2)]
    rows: list[dict[str, Any]] = []
    for name in arguments.strategies:
        first, later = (statistics.mean(turn[name][part] for turn in turns) for part in (0, 1))
        steps = first + (arguments.epochs - 1) * later
        rows.append({"strategy": name, "first_epoch": first, "later_epochs": later, "sum_over_epochs": steps})
        rows[-1]["share"] = steps / rows[0]["sum_over_epochs"]
        share = rows[-1]["share"]
        print(f"{name}: {1000 * first:.1f} ms per step, later {1000 * later:.1f} ms; {share:.2f} of the time")
    settings = {name: getattr(arguments, name) for name in ("model", "memory_tries", "batch_size", "epochs")}
    settings |= {name: getattr(arguments, name) for name in ("precision", "compile")}
    report = {"device": device_name(torch.device(arguments.device)), "versions": versions(), **settings, "rows": rows}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
