"""What a greedy training step costs, over what it must cost: 25 inference passes and one step on two copies.

Both are measured in turn in one run, on the machine at hand, so the ratio means something even where times are noisy.
Prints a table and writes JSON.

    python benchmarks/greedy_step.py --model tf_efficientnet_lite0 --batch-size 64 --device cuda --precision bf16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from patchproof.masking import AUTOCAST, Engine, MaskedForward, network
from patchproof.models import ImageClassifier, load_classifier
from patchproof.training import masking_strategy
from patchproof.training.losses import masked_loss
from patchproof.types import Precision

SEARCH_PASSES = 25


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - started


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Memory above what is held already, on a GPU; the CPU has no such counter."""
    if device.type != "cuda":
        work()
        return None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    work()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - held


class Step:
    """The parts of one training step on a fixed batch."""

    def __init__(
        self, classifier: ImageClassifier, batch: int, precision: Precision, device: torch.device, chunk: int
    ) -> None:
        self.classifier, self.device, self.precision, self.chunk = classifier.to(device), device, precision, chunk
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(batch, 3, *classifier.input_size, generator=generator).to(device)
        self.labels = torch.randint(classifier.num_classes, (batch,), generator=generator).to(device)
        self.strategy = masking_strategy(
            "greedy",
            image_size=classifier.input_size,
            generator=generator,
            engine=Engine(batch_size=chunk, precision=precision),
        )
        self.optimizer = torch.optim.SGD(classifier.parameters(), lr=1e-6, momentum=0.9)
        self.keep = self.search()

    def search(self) -> torch.Tensor:
        return self.strategy(self.classifier, self.images, self.labels)

    def inference(self) -> None:
        """As many copies as the search looks at, through the bare network, in the same chunks."""
        one_pass = network(self.classifier.eval(), precision=self.precision)
        for part in self.images.repeat(SEARCH_PASSES, 1, 1, 1).split(self.chunk):
            one_pass(part, None)

    def update(self) -> None:
        self.classifier.train()
        dtype = AUTOCAST.get(self.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss, _ = masked_loss(MaskedForward(self.classifier), self.images, self.labels, self.keep)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def greedy_step(self) -> None:
        self.keep = self.search()
        self.update()

    def floor(self) -> None:
        self.inference()
        self.update()


def measure(step: Step, rounds: int) -> dict[str, float | int | None]:
    for work in (step.greedy_step, step.floor):
        work()
    ratios, greedy, floor = [], [], []
    for _ in range(rounds):
        greedy.append(seconds(step.greedy_step, step.device))
        floor.append(seconds(step.floor, step.device))
        ratios.append(greedy[-1] / floor[-1])
    return {
        "greedy_step_seconds": statistics.median(greedy),
        "floor_seconds": statistics.median(floor),
        "ratio": statistics.median(ratios),
        "ratio_worst": max(ratios),
        "search_peak_bytes": peak_bytes(step.search, step.device),
        "update_peak_bytes": peak_bytes(step.update, step.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=None, help="masked copies in one pass; default: two per image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    classifier = load_classifier(arguments.model, arguments.weights, num_classes=10)
    chunk = arguments.chunk or 2 * arguments.batch_size
    found = measure(Step(classifier, arguments.batch_size, arguments.precision, device, chunk), arguments.rounds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    report = {"model": arguments.model, "batch_size": arguments.batch_size, "chunk": chunk, "device": name}
    report |= {"precision": arguments.precision, "torch": torch.__version__, **found}
    for key, value in report.items():
        print(f"{key:22} {value}")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
