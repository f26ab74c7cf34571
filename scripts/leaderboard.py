"""Certified defences side by side: rows counted from run folders, and what papers report, in one file and one page.

    python scripts/leaderboard.py                       # docs/leaderboard.md and results/leaderboard/ from results/
    python scripts/leaderboard.py --check               # is all of it current?
    python scripts/leaderboard.py --row RUN --note "ResNet-18, 40 epochs"        # the row of a run, to look at

To add a row, put the run's manifest.json, results.json and records.jsonl.xz into results/leaderboard/NAME/RUN, a file
note.txt of one line (network and training) into results/leaderboard/NAME, and run this script. All measured numbers
are counted from the records.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from evidence_records import runs_of, stored

from patchproof.geometry import patch_words, size_words
from patchproof.recipes import FIELD_RECIPES, Expectation, recipes
from patchproof.runs import StoredCertification, read_run
from patchproof.types import PatchproofError

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "leaderboard"
SCHEMA = 1
LITERATURE = "Table 1 of Greedy Cutout (Saha et al. 2023)"
RIVALS = [recipe for recipe in FIELD_RECIPES.values() if recipe.defense != "patchcleanser"]
NETWORKS = {"resnet": "ResNet", "vit": "ViT", "convnext": "ConvNeXt"}
STRATEGIES = {"cutout": "random Cutout", "rand": "random certification masks", "greedy": "Greedy Cutout"}
ALSO = {  # runs of the paper's own evidence that are about the same images and patches
    f"cifar10/{strategy}-seed0/native/certify-{patch}-6x6": f"EfficientNet-lite0 from ImageNet, 10 epochs of {strategy}"
    for strategy in ("cutout", "greedy")
    for patch in ("5px", "2px")
}


def row(run: StoredCertification, note: str, folder: str) -> dict[str, Any]:
    """What a run shows, counted from its records."""
    patch = patch_words(str(run.config["patch"])) if run.native else size_words(*run.patch_sizes)
    patch = ("" if run.patches == 1 else "two of ") + patch.replace(" pixels", "")
    return {
        "defense": run.defense,
        "guarantee": run.guarantee,
        "data": run.dataset,
        "patch": patch,
        "certified": run.rates["certified"].as_dict(),
        "clean": run.rates["defended"].as_dict(),
        "passes_per_image": round(statistics.mean(record.forwards for record in run.good), 1),
        "network": note,
        "measured": True,
        "source": folder,
        "weights_sha256": run.weights_sha256,
    }


def literature(defense: str, cell: Expectation, network: str = "") -> dict[str, Any]:
    """A cell of Table 1."""
    assert cell.certified is not None
    return {
        "defense": defense,
        "guarantee": "recovery",
        "data": "cifar10",
        "patch": {"2px": "2×2", "5px": "5×5", "14px": "2×2", "35px": "5×5"}[cell.patch],  # 14 and 35 of 224 pixels
        "certified": {"rate": cell.certified / 100},
        "clean": None if cell.defended is None else {"rate": cell.defended / 100},
        "passes_per_image": None,
        "network": network,
        "measured": False,
        "source": LITERATURE,
        "weights_sha256": None,
    }


def note_of(run: Path) -> str:
    """The line on network and training beside a run."""
    path = run.parent / "note.txt"
    if not path.exists():
        refuse(f"{run.parent} has no note.txt, one line that names network and training")
    return path.read_text("utf-8").strip()


def refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def rows() -> list[dict[str, Any]]:
    """Measured ones first, each kind by certified accuracy."""
    places = {path: note_of(path) for path in runs_of("certify", FOLDER)}
    places |= {ROOT / "results" / path: note for path, note in ALSO.items()}
    runs = {path: stored(path) for path in places}
    tested = {path: run for path, run in runs.items() if run.manifest["data"]["split"] != "train"}
    found = [row(run, places[path], str(path.relative_to(ROOT))) for path, run in tested.items()]
    found += [literature(recipe.defense, cell) for recipe in RIVALS for cell in recipe.expectations]
    for (architecture, network), (strategy, words) in product(NETWORKS.items(), STRATEGIES.items()):
        cells = recipes()[f"cifar10-{architecture}-{strategy}"].expectations
        title = f"{network}, {words}"
        found += [literature("patchcleanser", cell, title) for cell in cells if (cell.table, cell.masks) == ("1", 6)]
    return sorted(found, key=lambda one: (not one["measured"], one["patch"], -one["certified"]["rate"]))


def percent(rate: dict[str, Any] | None) -> str:
    if rate is None:
        return ""
    interval = rate.get("interval")
    spread = f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else ""
    return f"{100 * rate['rate']:.1f}%{spread}"


COLUMNS = (
    "defence",
    "guarantee",
    "data",
    "patch",
    "images",
    "certified",
    "clean, defended",
    "passes per image",
    "network",
    "source (in results/)",
)


def cells(one: dict[str, Any]) -> list[str]:
    passes = one["passes_per_image"]
    return [
        *(one[name] for name in ("defense", "guarantee", "data", "patch")),
        f"{one['certified']['n']:,}" if one["measured"] else "",
        percent(one["certified"]),
        percent(one["clean"]),
        "" if passes is None else f"{passes:,.1f}",
        one["network"],
        one["source"].removeprefix("results/") if one["measured"] else f"literature: {one['source']}",
    ]


def shown(text: str) -> str:
    """The text of a cell, with an interval on a line of its own and paths that may break."""
    return re.sub(r"% \((.*)\)$", r"%<br>(\1)", html.escape(text)).replace("/", "/<wbr>")


def page(found: list[dict[str, Any]]) -> str:
    """One HTML file; a click on a heading sorts."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "\n".join(
        f'<tr class="{"ours" if one["measured"] else "theirs"}">'
        + "".join(f"<td>{shown(text)}</td>" for text in cells(one))
        + "</tr>"
        for one in found
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Certified defences against adversarial patches</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
th, td {{ text-align: left; padding: .4rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }}
td:nth-child(6), td:nth-child(7) {{ white-space: nowrap }} td:nth-child(9) {{ min-width: 8.5rem }}
th {{ white-space: nowrap }} th[aria-sort]::after {{ content: " ▾" }}
th[aria-sort=ascending]::after {{ content: " ▴" }} .theirs {{ color: #666; font-style: italic }}
</style></head><body>
<h1>Certified defences against adversarial patches</h1>
<p>Upright: measured by this project and counted from one record per image. <i>Italic: numbers of the literature, with
other networks and training.</i> Recovery (the right label) and detection (the right label or an alarm) are different
promises. Click a heading to sort.</p>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>
<script>
{(ROOT / "docs" / "_static" / "sort.js").read_text("utf-8")}</script></body></html>
"""


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(map(shown, cells(one))) + " |" for one in found])


def votes_table() -> str:
    """The same votes of the same network under several rules, as counted from the records.

    Robust masking was run on the votes of derandomized smoothing only.
    """
    head = ("defence", "patch", "paper's count", "exact", "count without ties", "robust masking, without ties")
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for name, patch in product(("derandomized-smoothing", "smoothed-vit"), ("2px", "5px")):
        voting, side = stored(FOLDER / name / f"certify-{patch}"), int(patch.removesuffix("px"))
        votes = {record.index: record.evidence["votes"] for record in voting.good}
        right = {record.index for record in voting.good if record.defended}
        reached = 2 * (side + voting.config["band"] - 1)  # with a view at every column
        strict = {i for i in right if votes[i]["label"] - votes[i]["runner_up"] > reached}
        if any(vote["count"] > vote["exact"] for vote in votes.values()):
            sys.exit(f"{name}, {patch}: the exact certificate certifies less than the count; mend the page")
        counts = [*(sum(vote[rule] for vote in votes.values()) for rule in ("count", "exact")), len(strict)]
        if name == "derandomized-smoothing":
            masking = stored(FOLDER / "patchguard-smoothing" / f"certify-{patch}")
            masked = {record.index for record in masking.good if record.certified}
            if not strict <= masked:
                sys.exit(f"{patch}: robust masking certifies less than counted votes without ties; mend the page")
            counts.append(len(masked))
        shares = [f"{100 * count / len(votes):.2f}%" for count in counts]
        lines.append(" | ".join([name, f"{side}×{side}", *shares, *[""] * (4 - len(shares))]))
    return "\n".join(f"| {line} |" for line in lines)


def attacks_table() -> str:
    """Certified images of each defence under attack by what knows its rule."""
    lines = [
        "| defence | network | certified and attacked | broken | passes per attacked image |",
        "|---|---|---:|---:|---:|",
    ]
    for path in runs_of("attack", FOLDER):
        run = stored(path)
        tried = [record for record in run.attacks if record.attack.attacked is not None]
        passes = statistics.mean(record.attack.passes for record in tried)
        broken = sum(record.broken for record in tried)
        lines.append(f"| {run.defense} | {note_of(path)} | {len(tried)} | {broken} | {passes:,.0f} |")
    return "\n".join(lines)


def between(text: str, name: str, content: str) -> str:
    """The text with this content between its two marks."""
    before, _, rest = text.partition(f"<!-- {name} -->")
    return f"{before}<!-- {name} -->\n{content}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def files() -> dict[Path, str]:
    found, document = rows(), ROOT / "docs" / "leaderboard.md"
    text = between(document.read_text("utf-8"), "leaderboard", table(found))
    return {
        FOLDER / "leaderboard.json": json.dumps({"schema": SCHEMA, "rows": found}, indent=2, ensure_ascii=False) + "\n",
        FOLDER / "index.html": page(found),
        document: between(between(text, "votes", votes_table()), "attacks", attacks_table()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--row", type=Path)
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    if arguments.row is not None:
        try:
            run = read_run(arguments.row, arguments.row.name)
        except (OSError, PatchproofError) as error:
            refuse(str(error))
        if not isinstance(run, StoredCertification):
            refuse(f"{arguments.row} is no certification")
        print(json.dumps(row(run, arguments.note, str(arguments.row)), indent=2, ensure_ascii=False))
        return
    for path, text in files().items():
        if arguments.check and (not path.exists() or path.read_text("utf-8") != text):
            sys.exit(f"{path.relative_to(ROOT)} is out of date; run python scripts/leaderboard.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
