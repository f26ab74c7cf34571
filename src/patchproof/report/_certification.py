"""Sections about one certification or attack, each with its figure and table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from patchproof.report._figures import COLOURS, FILLS, INK, Picture, dots, drawing, numbers
from patchproof.report._gallery import Cards, attacked_gallery, make_gallery
from patchproof.report._tables import SHOWN_ROWS, Cell, Section, Table, duration
from patchproof.report._trace import GUARANTEES, NAMED, TracedRun, rate_note, split_words
from patchproof.runs import Record, StoredCertification, find_images
from patchproof.types import printable, shortened, shortened_name

WITNESS = (
    "Left: the image as the network sees it. Right: the copy under the masks that decided. For an image without a "
    "certificate these are masks under which it fails, for a certified image those with the smallest margin. Masked "
    "pixels have the colour that the network saw; only the outlines are added. The images are evenly spaced from the "
    "narrowest margin to the widest."
)
ALONE = "The images as the network sees them, evenly spaced from the narrowest margin to the widest."
MARGIN = "The margin says how far the certificate is from failing; it is negative if the certificate failed."
TWO_MASK_MARGIN = (
    "The margin is the logit of the true label minus the largest other logit, for the pair of masks where this is "
    "smallest. If it is negative, some pair of masks makes the classifier predict another label."
)
EARLY = (
    "The run stops looking at an image at its first failure, so the smallest margin may be lower than the one given."
)
BOUNDS = (
    "Robust accuracy lies between two bounds: at least what is certified, at most what no patch that was tried could "
    "change. An attack that finds no patch proves nothing."
)
PATCHED = (
    "On the right is the image with the patch that changed the answer, framed. If the patch was not kept, its place is "
    "blank."
)
ATTACK_NAMES = {
    "undefended": "undefended",
    "undefended_attacked": "undefended, attacked",
    "defended": "defended",
    "attacked": "defended, attacked",
    "certified": "certified",
}
BINS = 24
OUTER = 0.5
"""Percentage of the values at either end that share the outermost bins, so that outliers do not squeeze the rest."""


def meanings(run: StoredCertification) -> dict[str, str]:
    """Accuracy -> what it is about."""
    through = "double masking" if run.defense == "patchcleanser" else f"the defence {run.defense}"
    promise = GUARANTEES[run.guarantee].replace("such patch", "such patch" if run.patches == 1 else "two such patches")
    return {
        "undefended": "clean images, the classifier alone",
        "defended": f"clean images, through {through}",
        "certified": f"{run.guarantee}: {promise}, provably",
    }


def one_certification(one: TracedRun, *, dataset: str | None, data_dir: Path | None, images: int) -> list[Section]:
    """All sections about one run. The page shows its accuracies in large type, so their table is only a file."""
    run, about = one.run, meanings(one.run)
    accuracies: list[dict[str, Cell]] = [
        {"accuracy": name, "images": f"{r.k:,} of {r.n:,}", "rate (95% interval)": r, "of what": about[name]}
        for name, r in run.rates.items()
    ]
    head = Section("accuracies", "Accuracies", tables=[Table.of("accuracies", "Accuracies", accuracies)], shown=False)
    settings = made_with(one)
    if not run.good:
        return [head, settings]
    fallen, cards, notice = list[Cards](), list[Cards](), None
    source = find_images(run, dataset, data_dir)
    if isinstance(source, str):  # the reason why they are not found
        notice = source
    else:
        fallen = attacked_gallery(run, source, images)
        cards, notice = make_gallery(run, source, images)
    if any(witness(run, record)[0] for record in run.good):
        gallery = Section("gallery", "Images and their witnesses", [WITNESS], cards=cards, notice=notice)
    else:
        gallery = Section("gallery", "Images", [ALONE], cards=cards, notice=notice)
    return [
        head,
        *attacked([run], fallen),
        *classes_of(run),
        margins_of(run),
        cost_of(run),
        gallery,
        settings,
    ]


def made_with(one: TracedRun) -> Section:
    """Everything that another person needs to make the run again."""
    run, manifest = one.run, one.run.manifest
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
        "guarantee": meanings(run)["certified"].removesuffix(", provably"),
        "masks": run.masks_words,
        "smallest margin that counts (τ)": "not measured" if run.tau is None else f"{run.tau:.3g} logits (float32)",
        **attack_settings(manifest["identity"].get("attack")),
        "precision": run.precision,
        "device": run.device,
        "date": str(manifest.get("date") or "not recorded"),
        "commit": str(manifest.get("commit") or "not recorded"),
        "patchproof": str((manifest.get("versions") or {}).get("patchproof") or "not recorded"),
        "folder": str(run.folder),
    }
    rows = [{"what": what, "value": printable(value)} for what, value in facts.items()]
    return Section("settings", "Made with", tables=[Table.of("settings", "Made with", rows)])


def attack_settings(plan: Any) -> dict[str, str]:
    """How strong the attack was, as it was asked for; empty for a run of `certify`."""
    if not isinstance(plan, Mapping):
        return {}
    effort = f"{plan['steps']} steps of at most {plan['step_size']} from {plan['restarts']} starts"
    places = "every place" if plan["place_search"] == "exhaustive" else f"{plan['places']} places"
    which = "certified images alone" if plan["only_certified"] else "all images"
    target = {"both": "the classifier alone, and the defence", "undefended": "the classifier alone"}
    return {
        "attack": f"{effort} at {places} per image ({plan['place_search']} search), seed {plan['seed']}",
        "attacked": f"{target.get(plan['target'], 'the defence')}, on {which}",
    }


def classes_of(run: StoredCertification) -> list[Section]:
    """The accuracies of each class, and from the lowest certified accuracy up, why images have no certificate."""
    found, rows = by_class(run), dict[int, dict[str, Cell]]()
    for label, rates in found.items():
        row: dict[str, Cell] = {"class": run.class_name(label), "images": rates["certified"].n}
        rows[label] = row | {name: rates[name] for name in reversed(run.rates)}
    table, labels = Table.of("classes", "Accuracies by class", list(rows.values()), [rate_note([run])]), list(found)
    if len(found) > MOST_CLASSES:
        rising = sorted(found, key=lambda label: found[label]["certified"].rate)
        labels = [*rising[:SHOWN_ROWS], *rising[-SHOWN_ROWS:]]
        shown = [tuple(rows[label].values()) for label in labels]
        table = table.excerpt(shown, "with the lowest and the highest certified accuracy")
    title = f"Accuracy by class, n = {len(run.good):,}"
    alt, height = f"{title}, with 95% intervals.", 1.2 + 0.27 * len(labels)
    with drawing("classes", title, alt, height=height) as (picture, axes):
        names = [f"{shortened(run.class_name(k), 24)} (n = {found[k]['certified'].n})" for k in labels]
        certified, defended = ([found[label][name] for label in labels] for name in ("certified", "defended"))
        key = f"certified ({run.guarantee})"
        dots(axes, names, [(key, certified, False), ("defended", defended, True)], step=-0.32)
        axes.set(xlabel="images of the class (%)", xlim=(-2, 102))
    enough, failures = enough_per_class(run), failures_table(run)
    words = ["Error bars are exact (Clopper–Pearson) 95% intervals."]
    return [
        Section("classes", "By class", words, [picture], [table], shown=enough),
        Section("failures", failures.title, (), failing_masks(run), [failures], shown=enough and bool(failures.rows)),
    ]


def failures_table(run: StoredCertification) -> Table:
    """One row per class with images that have no certificate, lowest certified accuracy first."""
    found, failed = by_class(run), dict[int, list[Record]]()
    for record in outcomes(run)["not certified"]:
        failed.setdefault(record.label, []).append(record)
    rows, notes = list[dict[str, Cell]](), list[str]()
    for label in sorted(failed, key=lambda label: (found[label]["certified"].rate, label)):
        row: dict[str, Cell] = {"class": run.class_name(label), "not certified": len(failed[label])}
        if "undefended" in run.rates:
            row["undefended wrong"] = sum(record.undefended is False for record in failed[label])
        if run.masks is not None:
            shares = list(mask_shares(run, failed[label]).items())[:NAMED]
            answers = Counter(witness(run, record)[1] for record in failed[label])
            wrong = [f"{run.class_name(a)} ({k:,}×)" for a, k in answers.most_common() if a not in (None, label)]
            row["masks"] = ", ".join(f"{number + 1} ({rate.k:,}×)" for number, rate in shares) or None
            row["answered"] = wrong[0] if wrong else None
        rows.append(row)
    if "undefended" in run.rates:
        notes.append("Undefended wrong: how many of these images the classifier gets wrong without any mask.")
    if run.masks is not None:
        which = "pairs of masks" if run.defense == "patchcleanser" else "masks"
        notes.append(f"Masks, answered: the most frequent among the {which} that decided, with how often they occur.")
    table = Table.of("failures", "Where certificates fail", rows, notes)
    return table.excerpt(table.rows[:SHOWN_ROWS], "with the lowest certified accuracy")


def failing_masks(run: StoredCertification) -> list[Picture]:
    """The grid of masks, with how often each mask is among those that decided a failure; none without a grid."""
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
    """Margins of the certified and of the other images; only those of masked copies are known to be logits."""
    unit = "margin" if run.masks is None else "margin (logits)"
    known = {words: [r.margin for r in some if r.margin is not None] for words, some in outcomes(run).items()}
    rows = list[dict[str, Cell]]()
    for words, values in known.items():
        row: dict[str, Cell] = {unit: words, "images": len(values)}
        for head, q in {"smallest": 0, "5%": 5, "median": 50, "95%": 95, "largest": 100}.items():
            row[head] = float(np.percentile(values, q)) if values else None
        rows.append(row)
    about = [TWO_MASK_MARGIN if run.defense == "patchcleanser" else MARGIN]
    if run.defense == "patchcleanser" and not run.exhaustive:
        about.append(EARLY)
    unknown, n = sum(record.margin is None for record in run.good), len(run.good)
    notes = [f"{unknown:,} images have no margin, because it is not a finite number."] if unknown else []
    table, every = Table.of("margins", "Margins", rows, notes, digits=3), [v for some in known.values() for v in some]
    if not every:
        return Section("margins", "Margins", about, tables=[table])
    edges, title = bin_edges(every), f"Margins, n = {n:,}"
    clipped = sum(not edges[0] <= value <= edges[-1] for value in every)
    with drawing("margins", title, f"{title}: histograms of the certified and of the other images.") as (picture, axes):
        for (words, values), colour, (face, hatch) in zip(known.items(), COLOURS, FILLS, strict=False):
            counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
            shares, label = 100 * counts / n, f"{words} (n = {len(values):,})"
            axes.stairs(shares, edges, fill=True, label=label, facecolor=face, edgecolor=colour, hatch=hatch, lw=0.8)
        if edges[0] < 0 < edges[-1]:
            axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        beyond = f"; {clipped:,} beyond the ends in the end bins" if clipped else ""
        axes.set(xlabel=unit + beyond, ylabel=f"images (% of {n:,})", ylim=(0, None))
    return Section("margins", "Margins", about, [picture], [table])


def bin_edges(values: Sequence[float]) -> list[float]:
    """Edges of bins of a round width, one of them at 0 if that is within; outliers are beyond the ends."""
    least, most = np.percentile(values, [OUTER, 100 - OUTER]).tolist()
    room = 0.5 if least == most else 0.0
    return list(map(float, MaxNLocator(BINS).tick_values(least - room, most + room)))


def cost_of(run: StoredCertification) -> Section:
    """Forward passes per image, and time."""
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
        facts["time"] = duration(run.seconds)
        if run.seconds < len(passes):
            facts["images per second"] = f"{len(passes) / run.seconds:,.1f}"
        else:
            facts["time per image"] = duration(run.seconds / len(passes))
    table = Table.of("cost", "Cost", [{"what": what, "how much": value} for what, value in facts.items()])
    return Section("cost", "Cost", tables=[table])


def attacked(runs: Sequence[StoredCertification], cards: Sequence[Cards] = ()) -> list[Section]:
    """Accuracies, broken certificates and cost of the runs that were attacked; nothing if none was."""
    chosen = [run for run in runs if run.attacks]
    if not chosen:
        return []
    rows, notes = list[dict[str, Cell]](), [rate_note(chosen)]
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
    if len(runs) == 1:  # the page shows the clean and certified accuracies in large type
        table = replace(table, rows=[row for row in table.rows if row[0] not in runs[0].rates], whole=table)
    title = f"Bounds on robust accuracy, n = {numbers(len(run.attacks) for run in chosen)}"
    alt = f"{title}: five accuracies with 95% intervals; robust accuracy lies in the band."
    with drawing("attacked", title, alt, height=1.9 + 0.6 * len(chosen)) as (picture, axes):
        for place, rates in enumerate(found):
            if "attacked" in rates:
                low, high = 100 * rates["certified"].rate, 100 * rates["attacked"].rate
                axes.fill_betweenx([place - 0.34, place + 0.34], low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        names = [f"{shortened_name(run.name, 24)}\n({run.guarantee})" for run in chosen]
        series = [(w, [rates.get(k) for rates in found], k.endswith("attacked")) for k, w in ATTACK_NAMES.items()]
        dots(axes, names, series, step=0.12)
        axes.set(xlabel="images (%)", xlim=(-2, 102))
    return [Section("attacked", "Under attack", [BOUNDS, PATCHED] if cards else [BOUNDS], [picture], [table], cards)]
