"""Write the tables of benchmarks/README.md from the JSON files in results/.

python benchmarks/table.py           # write them into README.md
python benchmarks/table.py --check   # exit with 1 if README.md differs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

Row = list[Any]


def results(pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted((HERE / "results").glob(pattern)):
        yield json.loads(path.read_text("utf-8"))


def benches() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Each report of `patchproof bench`, its rows by name, and its precision, which earlier ones have as a setting."""
    for found in results("bench-*.json"):
        precision = found.get("precision", found["config"]["precision"])
        yield found, {row["name"]: row for row in found["rows"]}, precision


def times(ours: dict[str, float], peer: dict[str, float] | None) -> str:
    return f"{ours['images_per_second'] / peer['images_per_second']:.1f}" if peer else "–"


def throughput() -> Iterator[Row]:
    """Labels per second, each counted once, of the bare network, the peer and ours."""
    for found, rows, precision in benches():
        config, peer = found["config"], rows.get("peer, certify")
        every, early, predict = (rows[f"ours, {way}"] for way in ("every pair", "early exit", "predict"))
        bare = max(found["raw_passes_per_second"].values())
        rates = [row.get("needed_per_second") or row["passes_per_second"] for row in (every, early, predict)]
        yield [
            found["model"] + (", tokens dropped" if config.get("drop_tokens") else ""),
            found["machine"]["device"],
            precision + (", compiled" if found.get("compile", config["compile"]) else ""),
            f"{found['images']}" + (", all survive" if config["surviving"] else ""),
            f"{bare:,.0f}",
            f"{peer['passes_per_second']:,.0f}" if peer else "–",
            f"{rates[0]:,.0f}",
            *(f"{rate / bare:.0%}" for rate in rates),
            times(every, peer),
            f"{early.get('needed', early['passes']) / early['images']:.1f} of {found['pairs']}",
            times(early, peer),
            max(found["differ"].values(), default="–"),
        ]


def prediction() -> Iterator[Row]:
    """Double masking's answers: ours in batches, the peer's one image at a time."""
    for found, rows, precision in benches():
        ours, peer = rows["ours, predict"], rows.get("peer, predict")
        if peer:
            speeds = [f"{row['images_per_second']:.3g}" for row in (ours, peer)]
            passes = f"{ours['passes'] / ours['images']:.1f}"
            cells = [found["model"], found["machine"]["device"], precision, found["masks"], passes]
            yield [*cells, *speeds, times(ours, peer)]


def scaling() -> Iterator[Row]:
    """Cost of certification by masks per axis, and by number of images."""
    for found, _, _ in benches():
        usual = {"per_axis": found["config"]["masks"], "masks": found["masks"], "pairs": found["pairs"]}
        for row in (usual | row for kind in ("masks", "images") for row in found["scaling"].get(kind, [])):
            cells = [found["model"], found["machine"]["device"], *(row[name] for name in usual), row["images"]]
            yield [*cells, f"{row['passes'] / row['images']:.1f}", f"{row['seconds'] / row['images']:.3g}"]


def processes() -> Iterator[Row]:
    """Time of one certification by number of processes."""
    for found in results("processes-*.json"):
        for row in found["rows"]:
            cells = [found["machine"], row["processes"], f"{row['seconds']:.1f}", f"{row['speed_up']:.2f}"]
            yield [*cells, "yes" if found["same_records"] else "NO"]


def greedy_steps() -> Iterator[Row]:
    """A greedy training step over its floor."""
    for found in results("greedy-step-*.json"):
        search, update = found["search_peak_bytes"], found["update_peak_bytes"]
        ratios = [f"{found[name]:.2f}" for name in ("ratio", "ratio_worst")]
        cells = [found[name] for name in ("model", "device", "precision", "batch_size", "chunk")]
        yield [*cells, *ratios, f"{search / update:.2f}" if search else "–"]


def strategy_times() -> Iterator[Row]:
    """A training with each strategy as a share of one with the first."""
    for found in results("strategy-time-*.json"):
        precision = found["precision"] + (", compiled" if found["compile"] else "")
        for row in found["rows"]:
            steps = [f"{1000 * row[epoch]:.0f}" for epoch in ("first_epoch", "later_epochs")]
            cells = [found["model"], found["device"], precision, found["batch_size"], row["strategy"]]
            yield [*cells, *steps, f"{row['share']:.2f}"]


FORMS = ("fp32", "tf32", "bf16 autocast", "bf16 converted", "fp16 converted", "bf16 compiled")
KINDS = ("bf16", "fp16", "tf32", "fp32 in other batches")


def precision() -> Iterator[Row]:
    """Passes per second of the bare network by form."""
    for found in results("precision-*.json"):
        measured = found["passes_per_second"]
        rates = [f"{measured[form]:,.0f}" if form in measured else "–" for form in FORMS]
        yield [found["model"], found["device"], *rates]


def gaps() -> Iterator[Row]:
    """Largest change of a gap against float32 by precision."""
    for found in results("precision-*.json"):
        if "largest_gap_change" in found:
            changes = [f"{found['largest_gap_change'][kind]:.2g}" for kind in KINDS]
            yield [found["model"], found["device"], found["masked_copies"], *changes]


def memory() -> Iterator[Row]:
    """Peak memory of certify by number of images."""
    for count, cost in next(results("memory-cpu.json")).items():
        yield [f"{int(count):,}", f"{cost['peak_bytes'] / 2**20:.0f}", f"{cost['seconds']:.0f}"]


TABLES: dict[str, tuple[Callable[[], Iterator[Row]], str]] = {
    "throughput": (
        throughput,
        "model | device | precision | images: | bare network: | peer: | ours, every pair: | of the bare network: | "
        "with early exit: | predict: | times the peer: | with early exit: labels per image: | times the peer: | "
        "decided otherwise:",
    ),
    "prediction": (
        prediction,
        "model | device | precision | masks: | passes per image: | images per second: | peer: | times the peer:",
    ),
    "scaling": (
        scaling,
        "model | device | masks per axis: | masks: | pairs: | images: | passes per image: | seconds per image:",
    ),
    "processes": (processes, "machine | processes: | seconds: | times as fast: | same records"),
    "precision": (precision, f"model | device | {': | '.join(FORMS)}:"),
    "gaps": (gaps, f"model | device | masked copies: | {': | '.join(KINDS)}:"),
    "greedy-steps": (
        greedy_steps,
        "model | device | precision | batch: | chunk: | time ratio (median): | (worst): | memory ratio:",
    ),
    "strategy-times": (
        strategy_times,
        "model | device | precision | batch: | strategy | ms per step, first epoch: | later: | share of the time:",
    ),
    "memory": (memory, "images: | peak (MiB): | seconds:"),
}
"""The rows and the columns of each table; a colon marks a column that is aligned to the right."""


def filled(text: str) -> str:
    """The text with every table written anew."""

    def block(match: re.Match[str]) -> str:
        rows, columns = TABLES[match[1]]
        heads = columns.split(" | ")
        lines = [[head.removesuffix(":") for head in heads], *rows()]
        drawn = [f"| {' | '.join(map(str, line))} |" for line in lines]
        drawn.insert(1, "|" + "".join("---:|" if head.endswith(":") else "---|" for head in heads))
        return "\n".join([f"<!-- table: {match[1]} -->\n", *drawn, "\n<!-- end -->"])

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def main() -> None:
    readme = HERE / "README.md"
    before = readme.read_text("utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if before == after else "benchmarks/README.md does not hold what results/ says")
    readme.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
