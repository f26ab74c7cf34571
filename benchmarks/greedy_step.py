"""The cost of a greedy training step relative to its floor: 25 inference passes and one step on two copies.

    python benchmarks/greedy_step.py --model tf_efficientnet_lite0 --batch-size 64 --device cuda --precision bf16

Both are measured alternately in one run, so the ratio means something even on a machine with noisy times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import DEVICE, machine, parser, write

from patchproof.masking import AUTOCAST, Engine, MaskedForward, network
from patchproof.models import load_classifier
from patchproof.throughput import wait
from patchproof.training import masking_strategy
from patchproof.training.loop import masked_loss

SEARCH_PASSES = 25


def seconds(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """GPU memory above what is held already; None on a CPU, which has no such counter."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - held


class Step:
    """The parts of one training step on a fixed batch."""

    def __init__(self, arguments: argparse.Namespace, chunk: int) -> None:
        self.device = torch.device(arguments.device)
        self.precision, self.chunk = arguments.precision, chunk
        self.classifier = load_classifier(arguments.model, "random", num_classes=10).to(self.device)
        size = self.classifier.input_size
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(arguments.batch_size, 3, *size, generator=generator).to(self.device)
        self.labels = torch.randint(10, (arguments.batch_size,), generator=generator).to(self.device)
        engine = Engine(batch_size=chunk, precision=self.precision)
        self.strategy = masking_strategy("greedy", image_size=size, generator=generator, engine=engine)
        self.optimizer = torch.optim.SGD(self.classifier.parameters(), lr=1e-6, momentum=0.9)
        self.keep = self.search()

    def search(self) -> torch.Tensor:
        return self.strategy(self.classifier, self.images, self.labels)

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
        """As many copies as the search evaluates through the bare network, in the same chunks, and the update."""
        one_pass = network(self.classifier.eval(), precision=self.precision)
        for part in self.images.repeat(SEARCH_PASSES, 1, 1, 1).split(self.chunk):
            one_pass(part, None)
        self.update()


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="tf_efficientnet_lite0")
    flags.add_argument("--batch-size", type=int, default=16)
    flags.add_argument("--chunk", type=int, default=None, help="masked copies in one pass; default: two per image")
    flags.add_argument("--device", default=DEVICE)
    flags.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    arguments = flags.parse_args()
    chunk = arguments.chunk or 2 * arguments.batch_size
    step = Step(arguments, chunk)
    for work in (step.greedy_step, step.floor):  # kernels are chosen
        work()
    rounds = [(seconds(step.greedy_step, step.device), seconds(step.floor, step.device)) for _ in range(5)]
    ratios = [greedy / floor for greedy, floor in rounds]
    report = {
        **machine(arguments.device),
        "model": arguments.model,
        "batch_size": arguments.batch_size,
        "chunk": chunk,
        "precision": arguments.precision,
        "greedy_step_seconds": statistics.median(greedy for greedy, _ in rounds),
        "floor_seconds": statistics.median(floor for _, floor in rounds),
        "ratio": statistics.median(ratios),
        "ratio_worst": max(ratios),
        "search_peak_bytes": peak_bytes(step.search, step.device),
        "update_peak_bytes": peak_bytes(step.update, step.device),
    }
    for key, value in report.items():
        print(f"{key:22} {value}")
    write(report, arguments.output)


if __name__ == "__main__":
    main()
