"""The tables of benchmarks/README.md, from the JSON files in results/.

python benchmarks/table.py           # write them into README.md
python benchmarks/table.py --check   # exit with 1 if README.md holds something else
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent


def throughput() -> Iterator[str]:
    """Labels per second, each counted once: the bare network, the peer, ours; and what that makes."""
    heads = (
        "model",
        "device",
        "precision",
        "images",
        "bare network",
        "peer",
        "ours, every pair",
        "of the bare network",
        "with early exit",
        "predict",
        "times the peer",
        "with early exit: labels per image",
        "times the peer",
        "decided otherwise",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|---|---|---|{'---:|' * (len(heads) - 3)}"
    for path in sorted((HERE / "results").glob("bench-*.json")):
        found = json.loads(path.read_text())
        rows = {row["name"]: row for row in found["rows"]}
        peer = rows.get("peer, certify")
        every, early = rows["ours, every pair"], rows["ours, early exit"]
        bare = max(found["raw_passes_per_second"].values())
        precision = found.get("precision", found["config"]["precision"])
        precision += ", compiled" if found.get("compile", found["config"]["compile"]) else ""
        images = f"{found['images']}{', all survive' if found['config']['surviving'] else ''}"
        model = found["model"] + (", tokens dropped" if found["config"].get("drop_tokens") else "")
        cells = [model, found["machine"]["device"], precision, images, f"{bare:,.0f}"]
        rates = [
            row.get("needed_per_second") or row["passes_per_second"] for row in (every, early, rows["ours, predict"])
        ]
        cells += [f"{peer['passes_per_second']:,.0f}" if peer else "–", f"{rates[0]:,.0f}"]
        cells += [*(f"{rate / bare:.0%}" for rate in rates), _times(every, peer)]
        cells += [
            f"{early.get('needed', early['passes']) / early['images']:.1f} of {found['pairs']}",
            _times(early, peer),
        ]
        yield f"| {' | '.join([*cells, str(max(found['differ'].values(), default='–'))])} |"


def prediction() -> Iterator[str]:
    """Double masking's answers: ours in batches, the peer's one image at a time."""
    yield "| model | device | precision | masks | passes per image | images per second | peer | times the peer |"
    yield f"|---|---|---|{'---:|' * 5}"
    for path in sorted((HERE / "results").glob("bench-*.json")):
        found = json.loads(path.read_text())
        rows = {row["name"]: row for row in found["rows"]}
        ours, peer = rows["ours, predict"], rows.get("peer, predict")
        if peer:
            speed = ours["images_per_second"], peer["images_per_second"]
            precision = found.get("precision", found["config"]["precision"])
            cells = [found["model"], found["machine"]["device"], precision, str(found["masks"])]
            cells += [f"{ours['passes'] / ours['images']:.1f}", *(f"{value:.3g}" for value in speed)]
            yield f"| {' | '.join([*cells, _times(ours, peer)])} |"


def scaling() -> Iterator[str]:
    """How the cost of certification grows with masks per axis, and with images."""
    yield "| model | device | masks per axis | masks | pairs | images | passes per image | seconds per image |"
    yield f"|---|---|{'---:|' * 6}"
    for path in sorted((HERE / "results").glob("bench-*.json")):
        found = json.loads(path.read_text())
        usual = {"per_axis": found["config"]["masks"], "masks": found["masks"], "pairs": found["pairs"]}
        for row in (usual | row for kind in ("masks", "images") for row in found["scaling"].get(kind, [])):
            cells = [found["model"], found["machine"]["device"], *(str(row[k]) for k in usual)]
            cells += [
                str(row["images"]),
                f"{row['passes'] / row['images']:.1f}",
                f"{row['seconds'] / row['images']:.3g}",
            ]
            yield f"| {' | '.join(cells)} |"


def processes() -> Iterator[str]:
    """How the time of one certification falls with processes."""
    yield "| machine | processes | seconds | times as fast | same records |"
    yield "|---|---:|---:|---:|---|"
    for path in sorted((HERE / "results").glob("processes-*.json")):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            cells = [found["machine"], str(row["processes"]), f"{row['seconds']:.1f}", f"{row['speed_up']:.2f}"]
            yield f"| {' | '.join([*cells, 'yes' if found['same_records'] else 'NO'])} |"


def _times(ours: dict[str, float], peer: dict[str, float] | None) -> str:
    return f"{ours['images_per_second'] / peer['images_per_second']:.1f}" if peer else "–"


def greedy_steps() -> Iterator[str]:
    """A greedy training step over its floor."""
    yield "| model | device | precision | batch | chunk | time ratio (median) | (worst) | memory ratio |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for path in sorted((HERE / "results").glob("greedy-step-*.json")):
        f = json.loads(path.read_text())
        search, update = f["search_peak_bytes"], f["update_peak_bytes"]
        memory = f"{search / update:.2f}" if search else "–"
        cells = [f["model"], f["device"], f["precision"], str(f["batch_size"]), str(f["chunk"])]
        cells += [f"{f['ratio']:.2f}", f"{f['ratio_worst']:.2f}", memory]
        yield f"| {' | '.join(cells)} |"


def strategy_times() -> Iterator[str]:
    """A training with each strategy as a share of one with the first."""
    yield "| model | device | precision | batch | strategy | ms per step, first epoch | later | share of the time |"
    yield f"|---|---|---|---:|---|{'---:|' * 3}"
    for path in sorted((HERE / "results").glob("strategy-time-*.json")):
        found = json.loads(path.read_text())
        precision = found["precision"] + (", compiled" if found["compile"] else "")
        for row in found["rows"]:
            cells = [found["model"], found["device"], precision, str(found["batch_size"]), row["strategy"]]
            cells += [f"{1000 * row[part]:.0f}" for part in ("first_epoch", "later_epochs")]
            cells.append(f"{row['share']:.2f}")
            yield f"| {' | '.join(cells)} |"


FORMS = ("fp32", "tf32", "bf16 autocast", "bf16 converted", "fp16 converted", "bf16 compiled")


def precision() -> Iterator[str]:
    """Passes per second of the bare network by form."""
    yield f"| model | device | {' | '.join(FORMS)} |"
    yield f"|---|---|{'---:|' * len(FORMS)}"
    for path in sorted((HERE / "results").glob("precision-*.json")):
        found = json.loads(path.read_text())
        measured = found["passes_per_second"]
        cells = [f"{measured[form]:,.0f}" if form in measured else "–" for form in FORMS]
        yield f"| {' | '.join([found['model'], found['device'], *cells])} |"


def gaps() -> Iterator[str]:
    """Largest change of a gap against float32 by precision."""
    kinds = ("bf16", "fp16", "tf32", "fp32 in other batches")
    yield f"| model | device | masked copies | {' | '.join(kinds)} |"
    yield f"|---|---|---:|{'---:|' * len(kinds)}"
    for path in sorted((HERE / "results").glob("precision-*.json")):
        found = json.loads(path.read_text())
        if "largest_gap_change" in found:
            cells = [f"{found['largest_gap_change'][kind]:.2g}" for kind in kinds]
            yield f"| {' | '.join([found['model'], found['device'], str(found['masked_copies']), *cells])} |"


def memory() -> Iterator[str]:
    """Peak memory of certify by number of images."""
    yield "| images | peak (MiB) | seconds |"
    yield "|---:|---:|---:|"
    for count, cost in json.loads((HERE / "results" / "memory-cpu.json").read_text()).items():
        yield f"| {int(count):,} | {cost['peak_bytes'] / 2**20:.0f} | {cost['seconds']:.0f} |"


TABLES = {
    "throughput": throughput,
    "prediction": prediction,
    "scaling": scaling,
    "processes": processes,
    "precision": precision,
    "gaps": gaps,
    "greedy-steps": greedy_steps,
    "strategy-times": strategy_times,
    "memory": memory,
}


def filled(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        rows = "\n".join(TABLES[match[1]]())
        return f"<!-- table: {match[1]} -->\n\n{rows}\n\n<!-- end -->"

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
