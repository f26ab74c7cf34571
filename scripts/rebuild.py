"""Rebuild every table and figure of results/ from the records in it, and the numbers in README.md and docs/.

    python scripts/rebuild.py            # write
    python scripts/rebuild.py --check    # say what is out of date, and exit with 1 if anything is

A document takes a table in between two comments, `<!-- results: NAME -->` and `<!-- end -->`. Nothing there is typed by
hand; every percentage is counted from records, and compared with the results.json beside them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from patchproof.recipes import recipes
from patchproof.records import ACCURACIES, Rate, Record, Tally
from patchproof.report._figures import draw, error_line
from patchproof.report._tables import Column, Table, csv_text, markdown
from patchproof.training import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/reproducing.md", "results/README.md")
FAMILIES = {"resnet": "ResNet", "vit": "ViT-B", "convnext": "ConvNeXt"}
ORDER = list(STRATEGIES)


@dataclass(frozen=True)
class Training:
    """One fine-tuning: what it took."""

    seconds: float
    epochs: int
    device: str
    forwards: int
    backwards: int


@dataclass(frozen=True)
class Result:
    """One certification, counted from its records."""

    experiment: str
    strategy: str
    seed: int
    native: bool
    patch: str
    masks: int
    rates: dict[str, Rate]
    available: int
    passes: float
    seconds: float
    device: str
    training: Training | None

    @property
    def certified(self) -> Rate:
        return self.rates["certified"]


def read(folder: Path) -> list[Result]:
    """Every certification below the folder."""
    found = [path.parent for path in sorted(folder.rglob("manifest.json"))]
    return [result(path, folder) for path in found if _json(path / "manifest.json")["command"] == "certify"]


def result(path: Path, root: Path) -> Result:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    lines = lzma.decompress((path / "records.jsonl.xz").read_bytes()).decode().splitlines()
    tally = Tally().add(Record.parse(line) for line in lines)
    for name in ACCURACIES:
        if (tally.rates()[name].k, tally.rates()[name].n) != (results[name]["k"], results[name]["n"]):
            raise SystemExit(f"{path}: results.json contradicts the records about `{name}`")
    experiment, run = path.relative_to(root).parts[:2]
    strategy, _, seed = run.partition("-seed")
    config = manifest["config"]
    train = root / experiment / run / "train"
    return Result(
        experiment=experiment,
        strategy=strategy,
        seed=int(seed or 0),
        native=config["threat_space"] == "native",
        patch=config["patch"],
        masks=config["masks"],
        rates=tally.rates(),
        available=manifest["data"]["images"],
        passes=tally.forwards / tally.good,
        seconds=results["cost"]["seconds"],
        device=manifest["device"],
        training=training(train) if train.is_dir() else None,
    )


def training(path: Path) -> Training:
    manifest, results = _json(path / "manifest.json"), _json(path / "results.json")
    return Training(
        results["seconds"],
        manifest["config"]["epochs"],
        manifest["device"],
        manifest["search"]["forwards"],
        manifest["search"]["backwards"],
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def pick(results: Iterable[Result], **wanted: object) -> list[Result]:
    return [r for r in results if all(getattr(r, name) == value for name, value in wanted.items())]


def cell(results: Sequence[Result], **wanted: object) -> str | None:
    """`82.1 ±1.2`: the rate and half of its exact 95% interval; `*` for a part of the images."""
    found = pick(results, **wanted)
    if not found:
        return None
    rate = found[0].certified
    return rate_text(rate) + ("*" if rate.n < found[0].available else "")


def rate_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * rate.rate:.1f} ±{50 * (high - low):.1f}"


def setting_columns(patches: Sequence[str], masks: Sequence[int]) -> list[tuple[str, int]]:
    return [(patch, count) for count in masks for patch in patches]


def notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Hardware, time, passes, seeds, and what the star means."""
    devices = sorted({r.device for r in results} | {r.training.device for r in results if r.training})
    trained = [r.training.seconds for r in results if r.training]
    words = [f"Hardware: {', '.join(devices)}."]
    if trained:
        words.append(f"Training took {min(trained) / 60:.1f} to {max(trained) / 60:.1f} minutes a run.")
    for masks in sorted({r.masks for r in results}):
        some = [r for r in results if r.masks == masks]
        passes, seconds = [r.passes for r in some], [r.seconds for r in some]
        words.append(
            f"{masks}×{masks} masks: {min(passes):.0f} to {max(passes):.0f} passes an image, "
            f"{min(seconds):.0f} to {max(seconds):.0f} s a certification."
        )
    words.append(f"Seeds: {', '.join(str(s) for s in sorted({r.seed for r in results}))}.")
    parts = sorted({r.certified.n for r in results if r.certified.n < r.available})
    if parts:
        listed = ", ".join(f"{n:,}" for n in parts)
        words.append(f"* an evenly spread part of the images: {listed} of {results[0].available:,}.")
    return (" ".join(words),)


def strategies_table(
    key: str, title: str, results: list[Result], settings: Sequence[tuple[str, int]], *, main: tuple[str, int]
) -> Table:
    """A row a strategy; percent of images, with half the width of the exact 95% interval. The other accuracies are
    those at the `main` setting."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)] + sorted(
        {r.strategy for r in results} - set(ORDER)
    ):
        own = pick(results, strategy=strategy, seed=0)
        base = pick(own, patch=main[0], masks=main[1])
        cost = own[0].training
        rows.append(
            (
                strategy,
                cost.forwards + cost.backwards if cost else None,
                cost.seconds / 60 if cost else None,
                rate_text(base[0].rates["undefended"]) if base else None,
                rate_text(base[0].rates["defended"]) if base else None,
                *(cell(own, patch=patch, masks=masks) for patch, masks in settings),
            )
        )
    columns = (
        Column("strategy"),
        Column("extra passes"),
        Column("minutes"),
        Column("undefended"),
        Column(f"defended ({main[1]}×{main[1]}, {main[0]})"),
        *(Column(f"{masks}×{masks} {patch}", group="certified") for patch, masks in settings),
    )
    return Table(key, title, columns, tuple(rows), notes(results))


def seeds_table(results: list[Result]) -> Table:
    """Mean over the seeds, and from the lowest to the highest."""
    rows = []
    for strategy in ORDER:
        for masks in (3, 6):
            some = pick(results, strategy=strategy, masks=masks, patch="3%")
            if len(some) > 1:
                rates = [100 * r.certified.rate for r in some]
                rows.append(
                    (
                        strategy,
                        f"{masks}×{masks}",
                        len(some),
                        statistics.mean(rates),
                        f"{min(rates):.1f}–{max(rates):.1f}",
                    )
                )
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("seeds"),
        Column("certified at 3%, mean (%)"),
        Column("lowest–highest"),
    )
    return Table("imagenette-seeds", "ImageNette: spread over seeds", columns, tuple(rows))


def paper_table(results: list[Result]) -> Table:
    """Certified accuracy at 3%: ours on another network beside the paper's three."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s, patch="3%", seed=0)]:
        for masks in (3, 6):
            ours = cell(pick(results, strategy=strategy, seed=0), patch="3%", masks=masks)
            theirs = [paper_cell(family, strategy, masks) for family in FAMILIES]
            if ours:
                rows.append((strategy, f"{masks}×{masks}", ours, *theirs))
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("ours, EfficientNet-lite0"),
        *(Column(f"paper, {name}") for name in FAMILIES.values()),
    )
    return Table("imagenette-paper", "ImageNette at 3%, beside the paper's networks", columns, tuple(rows))


def paper_cell(family: str, strategy: str, masks: int) -> float | None:
    recipe = recipes().get(f"imagenette-{family}-{strategy}")
    found = [e.certified for e in recipe.expectations if (e.patch, e.masks) == ("3%", masks)] if recipe else []
    return found[0] if found else None


def grid_table(key: str, title: str, results: list[Result]) -> Table:
    """Patches by mask sets, for one network."""
    masks = sorted({r.masks for r in results})
    patches = sorted({r.patch for r in results}, key=lambda p: float(p.rstrip("%px")))
    rows = [(patch, *(cell(results, patch=patch, masks=m) for m in masks)) for patch in patches]
    base = results[0].rates
    first = f"Undefended {rate_text(base['undefended'])}."
    columns = (Column("patch"), *(Column(f"{m}×{m}", group="certified") for m in masks))
    return Table(key, title, columns, tuple(rows), (f"{first} {notes(results)[0]}",))


def native_table(results: list[Result]) -> Table:
    """The patch of the literature beside the one a camera sees: 14 and 35 pixels of the input, 2×2 and 5×5 native."""
    pairs = (("14px", "2px", "2×2"), ("35px", "5px", "5×5"))
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)]:
        for masks in (3, 6):
            for usual, native, words in pairs:
                own = pick(results, strategy=strategy, masks=masks)
                rows.append(
                    (
                        strategy,
                        f"{masks}×{masks}",
                        words,
                        cell(own, patch=usual, native=False),
                        cell(own, patch=native, native=True),
                    )
                )
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("native patch"),
        Column("certified, as usually counted (7 times the side)"),
        Column("certified, its true footprint"),
    )
    return Table("cifar10-native", "CIFAR-10: what the usual number leaves out", columns, tuple(rows), notes(results))


def curve(results: list[Result]) -> Any:
    """Certified accuracy at 3% against masks an axis, for `cutout` and `greedy`."""
    chosen = [s for s in ("cutout", "greedy") if len(pick(results, strategy=s, seed=0, patch="3%")) > 2]

    def plot(axes: Axes) -> None:
        for number, strategy in enumerate(chosen):
            some = sorted(pick(results, strategy=strategy, seed=0, patch="3%"), key=lambda r: r.masks)
            error_line(
                axes,
                [float(r.masks) for r in some],
                [r.certified for r in some],
                label=strategy,
                number=number,
                of=len(chosen),
            )
        axes.set(xlabel="masks per axis", ylabel="certified at 3% (% of images)")

    ns = sorted({r.certified.n for r in results if r.patch == "3%" and r.strategy in chosen})
    title = f"ImageNette, n = {', '.join(f'{n:,}' for n in ns)}"
    return draw("imagenette-masks", title, "Certified accuracy against masks per axis, with 95% intervals.", plot)


def build(results: list[Result]) -> tuple[list[Table], list[Any]]:
    tables: list[Table] = []
    pictures = []
    nette = pick(results, experiment="imagenette")
    if nette:
        settings = setting_columns(("1%", "2%", "3%"), (3, 6))
        shown = [r for r in nette if r.masks in (3, 6)]
        tables.append(strategies_table("imagenette", "ImageNette, EfficientNet-lite0", shown, settings, main=("3%", 3)))
        tables += [seeds_table(nette), paper_table(nette)]
        tables.append(masks_table(nette))
        pictures.append(curve(nette))
    cifar = pick(results, experiment="cifar10")
    if cifar:
        settings = setting_columns(("14px", "35px"), (3, 6))
        usual = pick(cifar, native=False)
        tables += [
            strategies_table("cifar10", "CIFAR-10 at 224", usual, settings, main=("35px", 3)),
            native_table(cifar),
        ]
    net = pick(results, experiment="imagenet")
    if net:
        tables.append(grid_table("imagenet", "ImageNet, 1,000 validation images, pretrained as it is", net))
    return tables, pictures


def masks_table(results: list[Result]) -> Table:
    """The curve in numbers, with what it costs."""
    rows = []
    for strategy in ("cutout", "greedy"):
        for r in sorted(pick(results, strategy=strategy, seed=0, patch="3%"), key=lambda r: r.masks):
            star = "*" if r.certified.n < r.available else ""
            rows.append((strategy, f"{r.masks}×{r.masks}", rate_text(r.certified) + star, r.passes, r.seconds))
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("certified at 3%"),
        Column("passes an image"),
        Column("seconds"),
    )
    chosen = [r for r in results if r.strategy in ("cutout", "greedy") and r.patch == "3%" and r.seed == 0]
    return Table("imagenette-masks", "ImageNette: more masks", columns, tuple(rows), notes(chosen))


def filled(text: str, tables: dict[str, str]) -> str:
    """The document with every block replaced by its table."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise SystemExit(f"there is no table `{name}`; known are {', '.join(tables)}")
        return f"<!-- results: {name} -->\n\n{tables[name]}\n<!-- end -->"

    return re.sub(r"<!-- results: ([\w-]+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def wanted_files(root: Path) -> dict[Path, bytes]:
    """Everything this script writes, and what it should hold."""
    tables, pictures = build(read(root / "results"))
    texts = {table.key: markdown(table) for table in tables}
    files = {root / "results" / "tables" / f"{table.key}.md": texts[table.key].encode() for table in tables}
    files |= {root / "results" / "tables" / f"{table.key}.csv": csv_text(table).encode() for table in tables}
    files |= {root / "results" / "figures" / f"{p.key}.svg": p.svg_file.encode() for p in pictures}
    files |= {root / "results" / "figures" / f"{p.key}.png": p.png for p in pictures}
    for name in DOCUMENTS:
        path = root / name
        if path.exists():
            files[path] = filled(path.read_text("utf-8"), texts).encode()
    return files


def out_of_date(root: Path = ROOT) -> list[str]:
    """Files that do not hold what the records say. Pictures are left out: their bytes depend on the font library."""
    return [
        str(path.relative_to(root))
        for path, content in wanted_files(root).items()
        if path.suffix not in (".png", ".svg") and (not path.exists() or path.read_bytes() != content)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        stale = out_of_date()
        print("\n".join(f"out of date: {name}" for name in stale) or "everything holds what the records say")
        sys.exit(1 if stale else 0)
    for path, content in wanted_files(ROOT).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
