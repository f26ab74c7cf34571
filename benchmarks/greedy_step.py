"""The cost of a greedy training step relative to its floor: 25 inference passes and one step on two copies.

    python benchmarks/greedy_step.py --model tf_efficientnet_lite0 --batch-size 64 --device cuda --precision bf16

Both are measured alternately in one run, so the ratio means something even on a machine with noisy times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from common import DEVICE, machine, parser, write

from patchproof.masking import AUTOCAST, Engine, MaskedForward, network
from patchproof.models import load_classifier
from patchproof.training import masking_strategy
from patchproof.training.losses import masked_loss

SEARCH_PASSES = 25


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="tf_efficientnet_lite0")
    flags.add_argument("--batch-size", type=int, default=16)
    flags.add_argument("--chunk", type=int, default=None, help="masked copies in one pass; default: two per image")
    flags.add_argument("--device", default=DEVICE)
    flags.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    arguments = flags.parse_args()
    batch_size, precision = arguments.batch_size, arguments.precision
    chunk = arguments.chunk or 2 * batch_size
    device, dtype = torch.device(arguments.device), AUTOCAST.get(precision)
    classifier = load_classifier(arguments.model, "random", num_classes=10).to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, *classifier.input_size, generator=generator).to(device)
    labels = torch.randint(10, (batch_size,), generator=generator).to(device)
    engine = Engine(batch_size=chunk, precision=precision)
    strategy = masking_strategy("greedy", image_size=classifier.input_size, generator=generator, engine=engine)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1e-6, momentum=0.9)

    def search() -> torch.Tensor:
        return strategy(classifier, images, labels)

    def update(keep: torch.Tensor) -> None:
        classifier.train()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss, _ = masked_loss(MaskedForward(classifier), images, labels, keep)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def floor_step() -> None:
        """As many copies as the search evaluates through the bare network, in the same chunks, and the update."""
        one_pass = network(classifier.eval(), precision=precision)
        for part in images.repeat(SEARCH_PASSES, 1, 1, 1).split(chunk):
            one_pass(part, None)
        update(found)

    def greedy_step() -> None:
        update(search())

    found = search()
    for work in (greedy_step, floor_step):  # kernels are chosen
        work()
    rounds = [(seconds(greedy_step, device), seconds(floor_step, device)) for _ in range(5)]
    ratios = [greedy / floor for greedy, floor in rounds]
    report = {
        **machine(arguments.device),
        "model": arguments.model,
        "batch_size": batch_size,
        "chunk": chunk,
        "precision": precision,
        "greedy_step_seconds": statistics.median(greedy for greedy, _ in rounds),
        "floor_seconds": statistics.median(floor for _, floor in rounds),
        "ratio": statistics.median(ratios),
        "ratio_worst": max(ratios),
        "search_peak_bytes": peak_bytes(search, device),
        "update_peak_bytes": peak_bytes(lambda: update(found), device),
    }
    for key, value in report.items():
        print(f"{key:22} {value}")
    write(report, arguments.output)


if __name__ == "__main__":
    main()
