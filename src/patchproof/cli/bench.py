"""`patchproof bench`: how fast this machine certifies, next to the bare network and PatchCleanser's published loop."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape

from patchproof.cli._settings import BenchSettings, chosen
from patchproof.cli._setup import open_defense, open_source
from patchproof.cli._show import Console, new_table, print_json, print_table
from patchproof.cli._sources import resolved
from patchproof.cli._throughput import measure
from patchproof.runs import write_atomically

LEGEND = (
    "labels: of masked copies, per image, each counted once; again: decided by a later precision; of bare: of the "
    "fastest bare rate; peer: a loop like the published one"
)


def bench(settings: BenchSettings) -> int:
    status, source = Console(stderr=True), open_source(settings)
    how = chosen(settings, "limit", "workers", "peer_images", "surviving", "reference", "scaling", "seconds")
    how["say"] = lambda text: status.print(f"[dim]{escape(text)}[/]")
    found = measure(open_defense(settings, source), source, **how)
    measured = {"config": {name: value for name, value in resolved(settings).items() if name != "output"}, **found}
    if settings.json:
        print_json(measured)
    else:
        show_measured(measured, Console())
    if settings.output:
        write_atomically(settings.output, json.dumps(measured, indent=2) + "\n")
    # The published loop knows no τ, so it may decide a close call otherwise.
    return 1 if any(count for name, count in measured["differ"].items() if not name.startswith("peer")) else 0


def show_measured(measured: dict[str, Any], console: Console) -> None:
    raw, rows, latency = measured["raw_passes_per_second"], measured["rows"], measured["latency"]
    fastest = max(raw.values())
    numbers = ("n", "labels", "again", "labels/s", "of bare", "images/s", "× peer")
    title = f"{measured['model']} on {measured['data']}, {measured['masks']} masks, {measured['machine']['device']}"
    table = new_table("", *numbers, numbers=numbers, title=title)
    for name, rate in raw.items():
        table.add_row(f"bare, {name}", "", "", "", f"{rate:,.0f}", f"{rate / fastest:.0%}", "", "")
    peers = {row["name"].endswith("predict"): row for row in rows if row["name"].startswith("peer")}
    for row in rows:
        peer = peers.get(row["name"].endswith("predict"))
        table.add_row(
            row["name"],
            str(row["images"]),
            f"{row['needed'] / row['images']:.1f}",
            " ".join(f"{step} {count / row['needed']:.1%}" for step, count in row["decided_again"].items()),
            f"{row['needed_per_second']:,.0f}",
            f"{row['needed_per_second'] / fastest:.0%}",
            f"{row['images_per_second']:,.2f}",
            f"{row['images_per_second'] / peer['images_per_second']:.1f}" if peer else "",
        )
    print_table(console, table)
    console.print(LEGEND, style="dim")
    compiled = ", compiled" if measured["compile"] else ""
    memory = f"{measured['peak_bytes'] / 2**30:.2f} GiB"
    console.plain(f"precision {measured['precision']}{compiled}; peak memory {memory}")
    median = f"{1000 * latency['median']:.1f} ms (median of {latency['images']})"
    console.plain(f"one image alone is answered in {median}")
    for name, count in measured["differ"].items():
        console.print(f"images decided otherwise by {name}: {count}", style="bold red" if count else "green")
    for kind, rows in measured["scaling"].items():
        axes = ("per_axis", "masks", "pairs") if kind == "masks" else ()
        heads = [*(name.replace("_", " ") for name in axes), "images", "passes", "per image", "seconds", "peak GiB"]
        table = new_table(*heads, numbers=heads, title=f"cost by {kind}")
        for row in rows:
            counts = [f"{row[name]:,}" for name in (*axes, "images", "passes")]
            each, peak = row["passes"] / row["images"], row["peak_bytes"] / 2**30
            table.add_row(*counts, f"{each:,.1f}", f"{row['seconds']:.3f}", f"{peak:.2f}")
        print_table(console, table)
