"""One certification or attack in depth: each section from the records to its table and figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from patchproof.geometry import size_words
from patchproof.report._counts import (
    MOST_CLASSES,
    attacked_rates,
    by_class,
    enough_per_class,
    mask_shares,
    outcomes,
    witness,
)
from patchproof.report._figures import COLOURS, FILLS, INK, Picture, dots, drawing, numbers, percents
from patchproof.report._gallery import Cards, attacked_gallery, make_gallery
from patchproof.report._tables import SHOWN_CLASSES, SHOWN_FAILURES, Cell, Section, Table, duration
from patchproof.report._trace import GUARANTEES, NAMED, TracedRun, rate_note, split_words
from patchproof.runs import Rate, Record, StoredCertification, find_images
from patchproof.runs._reading import printable, shortened, shortened_name

WITNESS = (
    "Left the image as the network sees it, right the copy under the masks that decided: those under which it fails, "
    "or for a certified image those with the smallest margin. Masked pixels have the colour they had in the run; the "
    "outlines are drawn for the reader. Evenly spaced from the narrowest margin to the widest."
)
ALONE = "The images as the network sees them, evenly spaced from the narrowest margin to the widest."
MARGIN = "The margin says how far the certificate is from failing; it is negative where it failed."
TWO_MASK_MARGIN = (
    "The margin is the smallest lead of the label's logit over the runner-up among all pairs of masks. Negative: some "
    "pair makes the classifier answer another label."
)
EARLY = "Where an image is given up at its first failure, its margin bounds the smallest from above."
BOUNDS = (
    "What no tried patch changed is an upper bound on the accuracy under every patch, what is certified a lower one: "
    "robust accuracy is between them. A patch that was not found proves nothing."
)
PATCHED = "On the right the image with the patch that changed the answer, framed."
LOST = "Where the pixels of a patch are not kept, as in old runs, its place is blank."
ATTACK_NAMES = {
    "undefended": "undefended",
    "undefended_attacked": "undefended, attacked",
    "defended": "defended",
    "attacked": "defended, attacked",
    "certified": "certified",
}
BINS = 24
OUTER = 0.5
"""Percent of the values at either end that share the outermost bins, so that one outlier does not squeeze the rest."""


def meanings(run: StoredCertification) -> dict[str, str]:
    """What each accuracy is about."""
    through = "double masking" if run.defense == "patchcleanser" else f"the defence {run.defense}"
    promise = GUARANTEES[run.guarantee].replace("such patch", "such patch" if run.patches == 1 else "two such patches")
    return {
        "undefended": "clean images, the classifier alone",
        "defended": f"clean images, through {through}",
        "certified": f"{run.guarantee}: {promise}, provably",
    }


def one_certification(one: TracedRun, *, dataset: str | None, data_dir: Path | None, images: int) -> list[Section]:
    """In depth; accuracies stand on the page in large type, so their table is a file only."""
    run, about = one.run, meanings(one.run)
    accuracies: list[dict[str, Cell]] = [
        {"accuracy": name, "images": f"{r.k:,} of {r.n:,}", "rate (95% interval)": r, "of what": about[name]}
        for name, r in run.rates.items()
    ]
    facts = {
        "data set": run.dataset,
        "split": split_words(run),
        "images": f"{run.planned:,} of {run.available:,}",
        "architecture": run.architecture,
        "weights": run.weights or "not named",
        "sha256 of the weights": run.weights_sha256 or "not known",
        "trained on the masks of": one.strategy or "no training run is known",
        "network input": "unknown" if run.image_size is None else f"{size_words(run.image_size)} pixels",
        "patch": run.patch_words,
        "defence": run.defense,
        "guarantee": about["certified"].removesuffix(", provably"),
        "masks": run.masks_words,
        "smallest margin that counts (τ)": "not measured" if run.tau is None else f"{run.tau:.3g} logits (float32)",
        "precision": run.precision,
        "device": run.device,
        "date": str(run.manifest.get("date") or "not recorded"),
        "commit": str(run.manifest.get("commit") or "not recorded"),
        "patchproof": str((run.manifest.get("versions") or {}).get("patchproof") or "not recorded"),
        "folder": str(run.folder),
    }
    made = [{"what": what, "value": printable(value)} for what, value in facts.items()]
    head = Section("accuracies", "Accuracies", tables=[Table.of("accuracies", "Accuracies", accuracies)], shown=False)
    settings = Section("settings", "Made with", tables=[Table.of("settings", "Made with", made)])
    if not run.good:
        return [head, settings]
    source = find_images(run, dataset, data_dir)
    fallen, cards, notice = list[Cards](), list[Cards](), None
    if isinstance(source, str):  # why they are not found
        notice = source
    else:
        fallen, (cards, notice) = attacked_gallery(run, source, images), make_gallery(run, source, images)
    seen = any(witness(run, record)[0] for record in run.good)
    title, words = ("Images and their witnesses", WITNESS) if seen else ("Images", ALONE)
    return [
        head,
        *attacked([run], fallen),
        *classes_of(run),
        margins_of(run),
        cost_of(run),
        Section("gallery", title, [words], cards=cards, notice=notice),
        settings,
    ]


def classes_of(run: StoredCertification) -> list[Section]:
    """Accuracies by class; and from the lowest certified accuracy up, why images have no certificate."""
    found, enough, n = by_class(run), enough_per_class(run), f"n = {len(run.good):,}"
    rows: list[dict[str, Cell]] = []
    for label, rates in found.items():
        row: dict[str, Cell] = {"class": run.class_name(label), "images": rates["certified"].n}
        rows.append(row | {name: rates[name] for name in reversed(run.rates)})
    classes = Table.of("classes", "Accuracies by class", rows, [rate_note([run])])
    ordered = sorted(classes.rows, key=lambda row: next(cell.rate for cell in row if isinstance(cell, Rate)))
    ends = [*ordered[:SHOWN_CLASSES], *ordered[SHOWN_CLASSES:][-SHOWN_CLASSES:]]
    classes = classes.excerpt(ends, "lowest and the highest certified accuracy")

    # Both accuracies of each class, or of very many classes the certified one in rising order.
    many, key = len(found) > MOST_CLASSES, f"certified ({run.guarantee})"
    certified, defended = ([rates[name] for rates in found.values()] for name in ("certified", "defended"))
    title = f"Certified accuracy of {len(found):,} classes, {n}" if many else f"Accuracy by class, {n}"
    height = 3.1 if many else 1.2 + 0.27 * len(found)
    with drawing("classes", title, f"{title}, with 95% intervals.", height=height) as (picture, axes):
        if many:
            rising, ranks = sorted(certified, key=lambda rate: (rate.rate, rate.n)), range(1, len(found) + 1)
            low, high = ([100 * rate.interval[end] for rate in rising] for end in (0, 1))
            axes.fill_between(ranks, low, high, step="mid", color=COLOURS[0], alpha=0.25, lw=0, label="95% interval")
            axes.step(ranks, percents(rising)[0], where="mid", color=COLOURS[0], label=key)
            axes.set(xlabel="classes, from the lowest to the highest", ylabel="% of the class", ylim=(-2, 102))
        else:
            names = [f"{shortened(run.class_name(k), 24)} (n = {r['certified'].n})" for k, r in found.items()]
            dots(axes, names, [(key, certified, False), ("defended", defended, True)], step=-0.32)
            axes.set(xlabel="images of the class (%)", xlim=(-2, 102))

    failed = dict[int, list[Record]]()
    for record in outcomes(run)["not certified"]:
        failed.setdefault(record.label, []).append(record)
    rows, notes = [], []
    for label in sorted(failed, key=lambda label: (found[label]["certified"].rate, label)):
        records = failed[label]
        row = {"class": run.class_name(label), "not certified": len(records)}
        if "undefended" in run.rates:
            row["undefended wrong"] = sum(record.undefended is False for record in records)
        if run.masks is not None:
            shares = list(mask_shares(run, records).items())[:NAMED]
            row["masks"] = ", ".join(f"{number + 1} ({rate.k:,}×)" for number, rate in shares) or None
            wrong = Counter(a for r in records if (a := witness(run, r)[1]) is not None and a != label)
            row["answered"] = next((f"{run.class_name(a)} ({k:,}×)" for a, k in wrong.most_common(1)), None)
        rows.append(row)
    if "undefended" in run.rates:
        notes.append("Undefended wrong: of these, the images that the classifier misclassifies without any mask.")
    if run.masks is not None:
        which = "deciding pair of masks" if run.defense == "patchcleanser" else "deciding masks"
        notes.append(f"Masks and answers: the most frequent of the {which}, as far as the run looked, and how often.")
    failures = Table.of("failures", "Where certificates fail", rows, notes)
    failures = failures.excerpt(failures.rows[:SHOWN_FAILURES], "lowest certified accuracy")
    intervals = "Brackets and bands are exact (Clopper–Pearson) 95% intervals."
    return [
        Section("classes", "By class", [intervals], [picture], [classes], shown=enough),
        Section("failures", failures.title, (), failing_masks(run), [failures], shown=enough and bool(rows)),
    ]


def failing_masks(run: StoredCertification) -> list[Picture]:
    """Where in the grid of masks certificates fail: how often each mask is among those that decided."""
    shares = mask_shares(run, outcomes(run)["not certified"])
    if run.axes is None or not shares:
        return []
    rows, columns = run.axes
    values = np.array([100 * shares[i].rate if i in shares else 0.0 for i in range(rows * columns)])
    n = next(iter(shares.values())).n
    alt = f"For each of {rows}×{columns} masks, the percentage of {n:,} images without a certificate that it decides."
    with drawing("failing-masks", f"Masks that decide failures, n = {n:,}", alt, height=3.4) as (picture, axes):
        mesh = axes.pcolormesh(values.reshape(rows, columns), cmap="Blues", vmin=0, edgecolors="white", linewidth=1)
        for number, value in enumerate(values):
            row, column = divmod(number, columns)
            ink = "#ffffff" if value > 0.6 * values.max() else "#000000"
            size = 9 if columns <= 6 else 6
            axes.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=size)
        axes.grid(visible=False)
        axes.set_xticks(np.arange(columns) + 0.5, [str(i + 1) for i in range(columns)])
        axes.set_yticks(np.arange(rows) + 0.5, [str(i + 1) for i in range(rows)])
        axes.set(xlabel="column of masks", ylabel="row of masks", aspect="equal", ylim=(rows, 0))
        picture.figure.colorbar(mesh, ax=axes, shrink=0.8, label="% of these images")
    return [picture]


def margins_of(run: StoredCertification) -> Section:
    """Masked copies are compared by their logits; what another defence's margin is measured in is not known."""
    unit, rows = "margin" if run.masks is None else "margin (logits)", []
    for words, records in outcomes(run).items():
        values = [r.margin for r in records if r.margin is not None]
        row: dict[str, Cell] = {unit: words, "images": len(values)}
        for head, q in {"smallest": 0, "5%": 5, "median": 50, "95%": 95, "largest": 100}.items():
            row[head] = float(np.percentile(values, q)) if values else None
        rows.append(row)
    unknown = sum(record.margin is None for record in run.good)
    notes = [f"{unknown:,} images have no margin: it is not a finite number."] if unknown else []
    about = [TWO_MASK_MARGIN if run.defense == "patchcleanser" else MARGIN, *([] if run.exhaustive else [EARLY])]
    pictures = histogram_pictures(run, "margins", "Margins", unit, lambda record: record.margin)
    return Section("margins", "Margins", about, pictures, [Table.of("margins", "Margins", rows, notes, digits=3)])


def cost_of(run: StoredCertification) -> Section:
    passes = [record.forwards for record in run.good]
    smallest, median, high, largest = np.percentile(passes, [0, 50, 95, 100]).tolist()
    facts = {
        "passes, all images": f"{sum(passes):,}",
        "passes per image, mean": f"{sum(passes) / len(passes):,.1f}",
        "median": f"{median:,.0f}",
        "from, to": f"{smallest:,.0f} to {largest:,.0f}",
        "95% of images take at most": f"{high:,.0f}",
    }
    if run.defense == "patchcleanser" and run.masks is not None:
        facts["different masked copies per image"] = f"{len(run.masks.unions):,}"
    if run.seconds:
        each = run.seconds / len(passes)
        speed = {"images per second": f"{1 / each:,.1f}"} if each < 1 else {"time per image": duration(each)}
        facts |= {"time": duration(run.seconds)} | speed
    unit = "passes per image"
    pictures = histogram_pictures(run, "cost", "Passes per image", unit, lambda r: float(r.forwards))
    table = Table.of("cost", "Cost", [{"what": what, "how much": value} for what, value in facts.items()])
    return Section("cost", "Cost", (), pictures, [table])


def histogram(groups: Sequence[Sequence[float]], *, n: int) -> tuple[list[float], list[list[Rate]], int] | None:
    """Edges of common bins of a round width, one of which begins at 0 if that is within; for each group its shares of
    all n images; and how many values are outside and count in the end bins."""
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    if not len(values):
        return None
    least, most = np.percentile(values, [OUTER, 100 - OUTER]).tolist()
    room = 0.5 if least == most else 0.0
    edges = list(map(float, MaxNLocator(BINS).tick_values(least - room, most + room)))
    low, high = edges[0], edges[-1]
    found = [np.histogram(np.clip(group, low, high), edges)[0].tolist() for group in groups]
    clipped = int(((values < low) | (values > high)).sum())
    return edges, [[Rate(k, n) for k in row] for row in found], clipped


def histogram_pictures(
    run: StoredCertification, key: str, title: str, unit: str, value: Callable[[Record], float | None]
) -> list[Picture]:
    """A histogram of the certified images and of the others; none where there are no values."""
    known = {words: [v for r in some if (v := value(r)) is not None] for words, some in outcomes(run).items()}
    counted = histogram(list(known.values()), n=len(run.good))
    if counted is None:
        return []
    edges, shares, clipped = counted
    title = f"{title}, n = {len(run.good):,}"
    with drawing(key, title, f"{title}: histograms of the certified and of the other images.") as (picture, axes):
        for (words, values), row, colour, (face, hatch) in zip(known.items(), shares, COLOURS, FILLS, strict=False):
            bars = [(ends, rate) for ends, rate in zip(pairwise(edges), row, strict=True) if rate.k]
            middles, widths = [sum(ends) / 2 for ends, _ in bars], [right - left for (left, right), _ in bars]
            heights, reach = percents([rate for _, rate in bars])
            look: dict[str, Any] = {"facecolor": face, "edgecolor": colour, "hatch": hatch, "linewidth": 0.8}
            axes.bar(middles, heights, widths, label=f"{words} (n = {len(values):,})", **look)
            axes.errorbar(middles, heights, yerr=reach, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
        if edges[0] < 0 < edges[-1]:
            axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        beyond = f"; {clipped:,} beyond the ends in the end bins" if clipped else ""
        axes.set(xlabel=unit + beyond, ylabel=f"images (% of {len(run.good):,})")
    return [picture]


def attacked(runs: Sequence[StoredCertification], cards: Sequence[Cards] = ()) -> list[Section]:
    """Accuracies, broken certificates and cost of the runs that were attacked; transposed where that is one."""
    chosen = [run for run in runs if run.attacks]
    if not chosen:
        return []
    words, rows, notes = [BOUNDS], list[dict[str, Cell]](), [rate_note(chosen)]
    found = [attacked_rates(run) for run in chosen]
    for run, rates in zip(chosen, found, strict=True):
        findings = [record.attack for record in run.attacks if record.attack is not None]
        row: dict[str, Cell] = {"run": run.name} | {words: rates.get(name) for name, words in ATTACK_NAMES.items()}
        row["certified but broken"] = sum(record.broken for record in run.attacks)
        row["attacked copies"] = sum(one.passes for one in findings)
        rows.append(row)
        tried = sum(one.attacked is not None for one in findings)
        if 0 < tried < len(findings):
            some = f"{tried:,} of {len(findings):,} images were attacked behind the defence"
            notes.append(f"{run.name}: {some}; the others count as clean.")
    if len(rows) == 1:
        rows = [{"what": what, "images": cell} for what, cell in rows[0].items() if what != "run"]
    table = Table.of("attacked", "Under attack", rows, notes)
    if len(runs) == 1:  # the other rates stand above in large type
        table = replace(table, rows=[row for row in table.rows if row[0] not in runs[0].rates], whole=table)
    if cards:
        words += [PATCHED] if all(card.patched for _, some in cards for card in some) else [PATCHED, LOST]

    # For each run the accuracies as points on a line; the band from certified to attacked holds robust accuracy.
    title = f"Bounds on robust accuracy, n = {numbers(len(run.attacks) for run in chosen)}"
    alt = f"{title}: five accuracies with 95% intervals; a band holds what is robust."
    with drawing("attacked", title, alt, height=1.9 + 0.6 * len(chosen)) as (picture, axes):
        for place, rates in enumerate(found):
            if "attacked" in rates:
                low, high = 100 * rates["certified"].rate, 100 * rates["attacked"].rate
                axes.fill_betweenx([place - 0.34, place + 0.34], low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        names = [f"{shortened_name(run.name, 24)}\n({run.guarantee})" for run in chosen]
        series = [(w, [rates.get(k) for rates in found], k.endswith("attacked")) for k, w in ATTACK_NAMES.items()]
        dots(axes, names, series, step=0.12)
        axes.set(xlabel="images (%)", xlim=(-2, 102))
    return [Section("attacked", "Under attack", words, [picture], [table], cards)]
