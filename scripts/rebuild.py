"""Rebuild every table and figure of results/ from the records in it, and the numbers in README.md and docs/.

    python scripts/rebuild.py            # write
    python scripts/rebuild.py --check    # say what is out of date, and exit with 1 if anything is

A document takes a table in between two comments, `<!-- results: NAME -->` and `<!-- end -->`, and a single number in a
sentence in between `<!-- = NAME -->` and `<!-- . -->`. Nothing there is typed by hand; every percentage is counted from
records, and compared with the results.json beside them.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from audit_tau import audits
from evidence_imagenette import (
    curves,
    masks_table,
    rivals_table,
    seeds_table,
)
from evidence_paper import gap_table, paper_cell, paper_table, paper_values
from evidence_records import Attacked, Onslaught, Result, last_loss, paired, pick, read, read_attacks, read_campaigns
from evidence_tables import (
    TITLES,
    campaign_table,
    demo_masks_table,
    demo_table,
    grid_table,
    native_table,
    sandwich_table,
    seeds_and_strategies_table,
    setting_columns,
    strategies_table,
)

from patchproof.report import Table, csv_text, markdown

ROOT = Path(__file__).resolve().parents[1]
HEADLINE = "Percent of the 3,925 validation images, any patch of 3% of the image."
ONE_EPOCH = f"{HEADLINE} One epoch of fine-tuning, not ten."
STRONGER = (
    f"{HEADLINE} greedy: the paper's schedule. memory: 8 epochs, cosine, averaged weights (0.998), tries 2,2,2,1. "
    "greedy-head: greedy with the ImageNet head's rows for the ten classes, as the two recipes. memory8, memory32: the "
    "recipes imagenette-lite0-memory8 and imagenette-lite0-memory. pair: seeds 1 and 2 of memory as one ensemble, two "
    "passes for one. three: the seeds of memory32 as one ensemble. student: 10 epochs, otherwise as memory, taught by "
    "the pair (weight 0.7), light augmentation."
)
AGAIN = {
    "fashion-memory": "test images, any 5×5 patch. The recipes fashion-small-greedy and fashion-small-memory; share: "
    "the latter with 0.15 of its start.",
    "cifar10-memory": "test images, any 5×5 patch; 20,000 training images, the network of make demo. greedy: 3 epochs; "
    "greedy-averaged: with averaged weights (0.99), as all that follow. memory: 7, tries 2,2,2,1. children: 5, tries "
    "2,4,2,4. children-half: 2.",
}
IN_TABLE_1 = ("cutout", "rand", "greedy")
"""What the paper has for every patch."""
DOCUMENTS = (
    "README.md",
    "docs/reproducing.md",
    "docs/attacks.md",
    "docs/howto/masks.md",
    "docs/howto/strategy.md",
    "docs/decisions/0003-tau.md",
    "results/README.md",
)


def build(results: list[Result], attacks: list[Attacked], campaigns: list[Onslaught]) -> tuple[list[Table], list[Any]]:
    tables: list[Table] = [campaign_table(campaigns)] if campaigns else []
    for name in sorted({run.experiment for run in attacks}):
        own = [run for run in attacks if run.experiment == name]
        tables.append(sandwich_table(f"{name}-attacked", f"{TITLES[name]}: between the two bounds", own))
    pictures = []
    nette = pick(results, experiment="imagenette")
    if nette:
        settings = setting_columns(("1%", "2%", "3%"), (3, 6))
        shown = [r for r in nette if r.masks in (3, 6)]
        table_1 = [r for r in nette if r.strategy in IN_TABLE_1]
        tables.append(strategies_table("imagenette", "ImageNette, EfficientNet-lite0", shown, settings, main=("3%", 3)))
        tables += [
            seeds_and_strategies_table("headline", "ImageNette", pick(nette, patch="3%"), HEADLINE),
            seeds_table(nette),
            rivals_table(nette),
            paper_table("imagenette-paper", "imagenette", nette, patches=("3%",)),
            paper_table("imagenette-paper-smaller", "imagenette", table_1, patches=("2%", "1%")),
            paper_table("imagenette-clean", "imagenette", table_1, patches=("3%", "2%", "1%"), name="defended"),
            gap_table(nette),
            masks_table(nette),
        ]
        pictures += curves(nette)
    short = pick(results, experiment="imagenette-one-epoch")
    if short:
        tables.append(seeds_and_strategies_table(short[0].experiment, TITLES[short[0].experiment], short, ONE_EPOCH))
    stronger = pick(results, experiment="imagenette-stronger")
    if stronger:
        beside, key = pick(nette, strategy="greedy", patch="3%"), stronger[0].experiment
        tables.append(seeds_and_strategies_table(key, TITLES[key], [*beside, *stronger], STRONGER))
    cifar = pick(results, experiment="cifar10")
    if cifar:
        settings = setting_columns(("14px", "35px"), (3, 6))
        usual = pick(cifar, native=False)
        tables += [
            strategies_table("cifar10", "CIFAR-10 at 224", usual, settings, main=("35px", 3)),
            paper_table("cifar10-paper", "cifar10", usual, patches=("35px", "14px")),
            native_table(cifar),
        ]
    demo = pick(results, experiment="demo")
    if demo:
        tables += [demo_table(demo), demo_masks_table(demo)]
    fashion = pick(results, experiment="fashion")
    if fashion:
        words = f"Percent of {fashion[0].available:,} test images, any 5×5 patch."
        tables.append(seeds_and_strategies_table("fashion", "Fashion-MNIST, the network of make demo", fashion, words))
    for key, words in AGAIN.items():
        if again := pick(results, experiment=key):
            words = f"Percent of {again[0].available:,} {words}"
            tables.append(seeds_and_strategies_table(key, TITLES[key], again, words))
    net = pick(results, experiment="imagenet")
    if net:
        tables.append(grid_table("imagenet", "ImageNet, 1,000 validation images, pretrained as it is", net))
    return tables, pictures


def values(results: list[Result]) -> dict[str, str]:
    """Numbers for sentences, by name: `imagenette/greedy/3%/6` is the mean over seeds of what is certified with 6×6
    masks, `imagenette/greedy-cutout/3%/6` by how many points one mean is above another, `…/greedy-over-cutout/…` the
    same of the weakest seed against the strongest and `…/greedy-at-most-over-cutout/…` of the strongest against the
    weakest, `…/greedy-spread/…` how far several seeds lie apart, and `imagenette/resnet-greedy/…` how far below the
    paper's ResNet. See `native_values`, `first_seed_values` and `paper_values` for the others."""
    means: dict[tuple[str, str, str, int], float] = {}
    for r in results:
        if not r.native:
            same = pick(
                results, experiment=r.experiment, strategy=r.strategy, patch=r.patch, masks=r.masks, native=False
            )
            key = r.experiment, r.strategy, r.patch, r.masks
            means[key] = statistics.mean(100 * one.certified.rate for one in same)
    found = {f"{e}/{s}/{p}/{m}": f"{mean:.1f}%" for (e, s, p, m), mean in means.items()}
    for (e, s, p, m), mean in means.items():
        for (e2, s2, p2, m2), other in means.items():
            if (e2, p2, m2) == (e, p, m) and s2 != s:
                found[f"{e}/{s}-{s2}/{p}/{m}"] = points(mean - other)
                least, most = leads(results, (e, p, m), s, s2)
                found[f"{e}/{s}-over-{s2}/{p}/{m}"] = points(least)
                found[f"{e}/{s}-at-most-over-{s2}/{p}/{m}"] = points(most)
        if len({r.seed for r in pick(results, experiment=e, strategy=s, patch=p, masks=m, native=False)}) > 1:
            found[f"{e}/{s}-spread/{p}/{m}"] = points(leads(results, (e, p, m), s, s)[1])
    for (e, s, p, m), mean in means.items():
        theirs = paper_cell(e, "resnet", s, p, m, "certified")
        if theirs is not None:
            found[f"{e}/resnet-{s}/{p}/{m}"] = points(theirs - mean)
    return found | native_values(results) | first_seed_values(results) | paper_values()


def native_values(results: list[Result]) -> dict[str, str]:
    """`cifar10/native-greedy/5px/3` is what is certified for a patch of the camera's image, and
    `cifar10/greedy-native/35px-5px/3` what that is less than for a patch of the enlarged one; with `~` for `-`, where
    both looked at the same images."""
    found = {}
    for real in pick(results, native=True, seed=0):
        name = f"{real.experiment}/native-{real.strategy}/{real.patch}/{real.masks}"
        found[name] = f"{100 * real.certified.rate:.1f}%"
        for usual in pick(results, experiment=real.experiment, strategy=real.strategy, masks=real.masks, native=False):
            less = f"{real.experiment}/{real.strategy}-native/{usual.patch}{{}}{real.patch}/{real.masks}"
            if usual.seed == 0:
                found[less.format("-")] = points(100 * (usual.certified.rate - real.certified.rate))
            if usual.seed == 0 and usual.images == real.images:
                found[less.format("~")] = points(paired(usual, real).points)
    return found


def first_seed_values(results: list[Result]) -> dict[str, str]:
    """Of seed 0: `imagenette/gutout~none/3%/6` is a difference on the images that both looked at and
    `…/gutout~none-p/3%/6` the p of the exact McNemar test, `imagenette/greedy/3%/6~3` a difference between mask sets,
    `…/greedy/3%/6:3` how many times the passes it takes, `…/greedy-middle/3%/3` how often the worst pair hides the
    middle, `…/greedy-loss` the loss of the last epoch."""
    found = {}
    first = pick(results, native=False, seed=0)
    for one in first:
        name = f"{one.experiment}/{one.strategy}"
        if one.failing_in_the_middle is not None:
            found[f"{name}-middle/{one.patch}/{one.masks}"] = f"{100 * one.failing_in_the_middle:.0f}%"
        if one.training:
            found[f"{name}-loss"] = f"{last_loss(one.training):.3f}"
        for other in pick(first, experiment=one.experiment, patch=one.patch):
            if other is one:
                continue
            if other.masks == one.masks:
                pair, where = paired(one, other), f"{one.patch}/{one.masks}"
                found[f"{name}~{other.strategy}/{where}"] = points(pair.points)
                found[f"{name}~{other.strategy}-p/{where}"] = pair.p
            elif other.strategy == one.strategy:
                found[f"{name}/{one.patch}/{one.masks}~{other.masks}"] = points(paired(one, other).points)
                found[f"{name}/{one.patch}/{one.masks}:{other.masks}"] = f"{one.passes / other.passes:.0f}"
    return found


def attack_values(attacks: list[Attacked], campaigns: list[Onslaught]) -> dict[str, str]:
    """`attack/imagenette/greedy/3%/3/undefended_attacked` is one of the accuracies of an attack, with its interval;
    `campaign/tried` and `campaign/broken` count certificates of double masking in all campaigns."""
    found = {}
    for run in [run for run in attacks if run.seed == 0]:
        for name, rate in run.rates.items():
            low, high = rate.interval
            words = f"{100 * rate.rate:.0f}% ({100 * low:.0f}–{100 * high:.0f}%)"
            found[f"attack/{run.experiment}/{run.strategy}/{run.patch}/{run.masks}/{name}"] = words
    true = [one for one in campaigns if one.defense == "double masking"]
    sums = {name: sum(getattr(one, name) for one in true) for name in ("tried", "broken")}
    sums["networks"] = len({one.network for one in true})
    return found | {f"campaign/{name}": f"{number:,}" for name, number in sums.items()}


def audit_values(folder: Path) -> dict[str, str]:
    """How τ held up: `audit/redone` labels decided again, `audit/ratio` the largest change of a margin over the one
    measured, `audit/floor` of `audit/runs` runs with τ(fp32) at its floor."""
    found = list(audits(folder))
    return {
        "audit/runs": f"{len(found)}",
        "audit/redone": f"{sum(audit.redone or 0 for audit in found):,}",
        "audit/ratio": f"{max((audit.ratio or 0.0 for audit in found), default=0.0):.2f}",
        "audit/floor": f"{sum(audit.floor for audit in found)}",
    }


def points(difference: float) -> str:
    return f"{difference:.1f}".replace("-", "−")


def leads(results: list[Result], where: tuple[str, str, int], one: str, other: str) -> tuple[float, float]:
    """The weakest seed of one strategy against the strongest of another, and the other way round, in points."""
    experiment, patch, masks = where
    same = pick(results, experiment=experiment, patch=patch, masks=masks, native=False)
    ours, theirs = ([100 * r.certified.rate for r in pick(same, strategy=s)] for s in (one, other))
    return min(ours) - max(theirs), max(ours) - min(theirs)


def filled(text: str, tables: dict[str, str], numbers: dict[str, str]) -> str:
    """The document with every block replaced by its table, and every marked number by what it is."""

    def number(match: re.Match[str]) -> str:
        if match[1] not in numbers:
            raise SystemExit(f"there is no number `{match[1]}` in the records")
        return f"<!-- = {match[1]} -->{numbers[match[1]]}<!-- . -->"

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise SystemExit(f"there is no table `{name}`; known are {', '.join(tables)}")
        return f"<!-- results: {name} -->\n\n{tables[name]}\n<!-- end -->"

    text = re.sub(r"<!-- results: ([\w-]+) -->\n.*?<!-- end -->", block, text, flags=re.S)
    return re.sub(r"<!-- = (\S+) -->.*?<!-- \. -->", number, text, flags=re.S)


def wanted_files(root: Path) -> dict[Path, bytes]:
    """Everything this script writes, and what it should hold."""
    results = read(root / "results")
    attacks, campaigns = read_attacks(root / "results"), read_campaigns(root / "results")
    tables, pictures = build(results, attacks, campaigns)
    numbers = values(results) | attack_values(attacks, campaigns) | audit_values(root / "results")
    texts = {table.key: markdown(table) for table in tables}
    files = {root / "results" / "tables" / f"{table.key}.md": texts[table.key].encode() for table in tables}
    files |= {root / "results" / "tables" / f"{table.key}.csv": csv_text(table).encode() for table in tables}
    files |= {root / "results" / "figures" / f"{p.key}.svg": p.svg_file.encode() for p in pictures}
    files |= {root / "results" / "figures" / f"{p.key}.png": p.png for p in pictures}
    for name in DOCUMENTS:
        path = root / name
        if path.exists():
            files[path] = filled(path.read_text("utf-8"), texts, numbers).encode()
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
