"""Sections about one certification or attack, each with its figure and table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from patchproof.geometry import size_words
from patchproof.report._counts import (
    FEW_PER_CLASS,
    GUARANTEES,
    MOST_CLASSES,
    NAMED,
    TracedRun,
    attacked_rates,
    by_class,
    mask_name,
    mask_shares,
    outcomes,
    rate_note,
    witness,
)
from patchproof.report._figures import COLOURS, INK, Picture, dot_picture, drawing, numbers
from patchproof.report._gallery import Cards, attacked_gallery, make_gallery
from patchproof.report._tables import SHOWN_ROWS, Cell, Section, Table
from patchproof.runs import ATTACK_ACCURACIES, StoredCertification, find_images, rates
from patchproof.types import printable, shortened, shortened_name

WITNESS = (
    "Left: the image as the network sees it. Right: the copy under the masks that decided: for an image without a "
    "certificate masks under which it fails, for a certified image those with the smallest margin."
)
SPACED = "The images are evenly spaced from the narrowest margin to the widest."
MARGIN = "The margin says how far the certificate is from failing; it is negative if the certificate failed."
TWO_MASK_MARGIN = (
    "It is the logit of the true label minus the largest other logit, for the pair of masks where this is smallest; if "
    "the run stopped at an image's first failure, for that pair."
)
BOUNDS = (
    "Robust accuracy lies between two bounds: at least what is certified, at most what no patch that was tried could "
    "change. An attack that finds no patch proves nothing."
)
PATCHED = "Right: the image with the patch that changed the answer, framed; blank if the patch was not kept."
ATTACK_NAMES = {name: name for name in ATTACK_ACCURACIES} | {
    "undefended_attacked": "undefended, attacked",
    "attacked": "defended, attacked",
}
BINS = 24
OUTER = 0.5
"""Percentage of the margins at either end that lie beyond the outermost bins."""

FILLS = ((COLOURS[0], ""), ("none", "////"))
"""Face colour and hatch of the bars for certified and for other images."""


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
    rows: list[dict[str, Cell]] = [
        {"accuracy": name, "images": f"{r.k:,} of {r.n:,}", "rate (95% interval)": r, "of what": about[name]}
        for name, r in run.rates.items()
    ]
    accuracies = Section("accuracies", "Accuracies", tables=[Table.of("accuracies", "Accuracies", rows)], shown=False)
    if not run.good:
        return [accuracies, made_with(one)]
    source, fallen = find_images(run, dataset, data_dir), list[Cards]()
    if isinstance(source, str):  # the reason why they are not found
        gallery = Section("gallery", "Images", notice=source)
    else:
        fallen, (cards, notice) = attacked_gallery(run, source, images), make_gallery(run, source, images)
        words = [WITNESS, SPACED] if any(card.masked for _, some in cards for card in some) else [SPACED]
        gallery = Section("gallery", "Images and their witnesses", words, cards=cards, notice=notice)
    return [
        accuracies,
        *attacked([run], fallen),
        *classes_of(run),
        margins_of(run),
        cost_of(run),
        gallery,
        made_with(one),
    ]


def facts(one: TracedRun) -> dict[str, Cell]:
    """What a run is about, and everything else that another person needs to make it again."""
    run, manifest = one.run, one.run.manifest
    found = {
        "strategy": one.strategy,
        "data set": run.dataset,
        "split": manifest["data"].get("split") or "not named",
        "architecture": run.architecture,
        "defence": run.defense,
        "guarantee": run.guarantee,
        "masks": run.masks_words,
        "patch": run.patch_words,
        "weights": run.weights,
        "sha256 of the weights": run.weights_sha256,
        "network input": run.image_size and f"{size_words(run.image_size)} pixels",
        "smallest margin that counts (τ)": "not measured" if run.tau is None else f"{run.tau:.3g} logits (float32)",
        "precision": run.precision,
        "device": run.device,
        "date": manifest.get("date"),
        "commit": manifest.get("commit"),
        "patchproof": (manifest.get("versions") or {}).get("patchproof"),
        "folder": run.folder,
    }
    return {name: None if value is None else printable(str(value)) for name, value in found.items()}


def made_with(one: TracedRun) -> Section:
    plan = one.run.manifest["identity"].get("attack")
    found = facts(one) | {"images": f"{one.run.planned:,} of {one.run.available:,}"}
    if isinstance(plan, dict):
        found["attack"] = printable(", ".join(f"{name} {value}" for name, value in plan.items()))
    rows = [{"what": what, "value": value} for what, value in found.items()]
    return Section("settings", "Made with", tables=[Table.of("settings", "Made with", rows)])


def classes_of(run: StoredCertification) -> list[Section]:
    """The accuracies of each class, and from the lowest certified accuracy up, why images have no certificate."""
    found = {label: rates(records) for label, records in by_class(run).items()}
    rows: list[dict[str, Cell]] = [
        {"class": run.class_name(k), "images": r["certified"].n, **{name: r[name] for name in reversed(run.rates)}}
        for k, r in found.items()
    ]
    table, labels = Table.of("classes", "Accuracies by class", rows, [rate_note([run])]), list(found)
    rising = sorted(found, key=lambda label: found[label]["certified"].rate)
    if len(found) > MOST_CLASSES:
        labels = [*rising[:SHOWN_ROWS], *rising[-SHOWN_ROWS:]]
        shown = dict(zip(found, table.rows, strict=True))
        table = table.excerpt([shown[label] for label in labels], "with the lowest and the highest certified accuracy")
    names = [f"{shortened(run.class_name(k), 24)} (n = {found[k]['certified'].n})" for k in labels]
    shown_as = {"certified": f"certified ({run.guarantee})", "defended": "defended"}
    series = {words: [found[label][name] for label in labels] for name, words in shown_as.items()}
    title = f"Accuracy by class, n = {len(run.good):,}"
    picture = dot_picture("classes", title, names, series, "images of the class (%)")
    failures, pictures = failures_table(run, rising), list[Picture]()
    shares = list(mask_shares(run, outcomes(run)["not certified"]).items())[:SHOWN_ROWS]
    if shares:
        title = f"Masks that decide failures most often, n = {shares[0][1].n:,}"
        names = [mask_name(run, number) for number, _ in shares]
        series = {"": [share for _, share in shares]}
        pictures = [dot_picture("failing-masks", title, names, series, "images without a certificate (%)")]
    enough = len(found) <= MOST_CLASSES or len(run.good) >= FEW_PER_CLASS * len(found)
    words = ["Error bars are exact (Clopper–Pearson) 95% intervals."]
    return [
        Section("classes", "By class", words, [picture], [table], shown=enough),
        Section("failures", failures.title, (), pictures, [failures], shown=enough and bool(failures.rows)),
    ]


def failures_table(run: StoredCertification, labels: Sequence[int]) -> Table:
    """One row per class with images that have no certificate."""
    rows, notes, records = list[dict[str, Cell]](), list[str](), by_class(run)
    for label in labels:
        failed = [record for record in records[label] if not record.certified]
        row: dict[str, Cell] = {"class": run.class_name(label), "not certified": len(failed)}
        if "undefended" in run.rates:
            row["undefended wrong"] = sum(record.undefended is False for record in failed)
        if run.masks is not None:
            shares = list(mask_shares(run, failed).items())[:NAMED]
            answers = Counter(run.class_name(a) for r in failed if (a := witness(run, r)[1]) not in (None, label))
            row["masks"] = ", ".join(f"{number + 1} ({rate.k:,}×)" for number, rate in shares) or None
            row["answered"] = ", ".join(f"{name} ({k:,}×)" for name, k in answers.most_common(1)) or None
        rows += [row] if failed else []
    if "undefended" in run.rates:
        notes.append("Undefended wrong: how many of these images the classifier gets wrong without any mask.")
    if run.masks is not None:
        which = "pairs of masks" if run.defense == "patchcleanser" else "masks"
        notes.append(f"Masks, answered: the most frequent among the {which} that decided, with how often they occur.")
    table = Table.of("failures", "Where certificates fail", rows, notes)
    return table.excerpt(table.rows[:SHOWN_ROWS], "with the lowest certified accuracy")


def margins_of(run: StoredCertification) -> Section:
    """Margins of the certified and of the other images; only those of masked copies are known to be logits."""
    unit, n = "margin" if run.masks is None else "margin (logits)", len(run.good)
    known = {words: [r.margin for r in some if r.margin is not None] for words, some in outcomes(run).items()}
    rows = list[dict[str, Cell]]()
    for words, values in known.items():
        row: dict[str, Cell] = {unit: words, "images": len(values)}
        for head, q in {"smallest": 0, "5%": 5, "median": 50, "95%": 95, "largest": 100}.items():
            row[head] = float(np.percentile(values, q)) if values else None
        rows.append(row)
    about = [MARGIN, TWO_MASK_MARGIN] if run.defense == "patchcleanser" else [MARGIN]
    every = [margin for values in known.values() for margin in values]
    notes = [f"{n - len(every):,} images have no finite margin."] if len(every) < n else []
    table = Table.of("margins", "Margins", rows, notes, digits=3)
    if not every:
        return Section("margins", "Margins", about, tables=[table])
    # The outermost bins hold what lies beyond them, so that outliers do not squeeze the rest.
    edges = bin_edges(every)
    title, alt = f"Margins, n = {n:,}", "histograms of the certified and of the other images."
    with drawing("margins", title, f"{title}: {alt}") as (picture, axes):
        for (words, values), colour, (face, hatch) in zip(known.items(), COLOURS, FILLS, strict=False):
            shares = 100 / n * np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
            label = f"{words} (n = {len(values):,})"
            axes.stairs(shares, edges, fill=True, label=label, facecolor=face, edgecolor=colour, hatch=hatch, lw=0.8)
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel=f"{unit}; end bins with all beyond", ylabel=f"images (% of {n:,})", ylim=(0, None))
    return Section("margins", "Margins", about, [picture], [table])


def bin_edges(margins: list[float]) -> np.ndarray:
    """Edges of equal bins, none of which has margins of both signs."""
    low, high = (float(q) for q in np.percentile(margins, [OUTER, 100 - OUTER]))
    low, high = min(low, 0.0) if min(margins) < 0 else low, max(high, 0.0) if max(margins) >= 0 else high
    step = max((high - low) / BINS, 1e-6 * max(-low, high)) if high > low else 1.0
    first = min(math.floor(low / step), -1) if min(margins) < 0 else math.floor(low / step)
    return step * np.arange(first, math.floor(high / step) + 2)


def cost_of(run: StoredCertification) -> Section:
    """Forward passes per image, and time."""
    passes = [record.forwards for record in run.good]
    found = {
        "passes, all images": f"{sum(passes):,}",
        "passes per image, mean": f"{sum(passes) / len(passes):,.1f}",
        "median": f"{np.median(passes):,.0f}",
        "from, to": f"{min(passes):,.0f} to {max(passes):,.0f}",
    }
    if run.defense == "patchcleanser" and run.masks is not None:
        found["different masked copies per image"] = f"{len(run.masks.unions):,}"
    if run.seconds:
        each = run.seconds / len(passes)
        found["time"] = f"{run.seconds:,.1f} s"
        found |= {"images per second": f"{1 / each:,.1f}"} if each < 1 else {"time per image": f"{each:,.1f} s"}
    table = Table.of("cost", "Cost", [{"what": what, "how much": value} for what, value in found.items()])
    return Section("cost", "Cost", tables=[table])


def attacked(every: Sequence[StoredCertification], cards: Sequence[Cards] = ()) -> list[Section]:
    """Accuracies, broken certificates and cost of the runs that were attacked; nothing if none was."""
    runs = [run for run in every if run.attacks]
    if not runs:
        return []
    rows, notes, found = list[dict[str, Cell]](), [rate_note(runs)], [attacked_rates(run) for run in runs]
    for run, known in zip(runs, found, strict=True):
        findings = [record.attack for record in run.attacks if record.attack is not None]
        row: dict[str, Cell] = {"run": run.name} | {words: known.get(name) for name, words in ATTACK_NAMES.items()}
        row["certified but broken"] = sum(record.broken for record in run.attacks)
        row["attacked copies"] = sum(one.passes for one in findings)
        rows.append(row)
        tried = sum(one.attacked is not None for one in findings)
        if 0 < tried < len(findings):
            some = f"{tried:,} of {len(findings):,} images were attacked behind the defence"
            notes.append(f"{run.name}: {some}; the others count as clean.")
    if len(rows) == 1:
        rows = [{"what": what, "images": cell} for what, cell in rows[0].items() if what != "run"]
    known_of_some = {name: words for name, words in ATTACK_NAMES.items() if any(name in known for known in found)}
    series = {words: [known.get(name) for known in found] for name, words in known_of_some.items()}
    names = [f"{shortened_name(run.name, 24)}\n({run.guarantee})" for run in runs]
    title = f"Bounds on robust accuracy, n = {numbers(len(run.attacks) for run in runs)}"
    picture = dot_picture("attacked", title, names, series, "images (%)")
    table, words = Table.of("attacked", "Under attack", rows, notes), [BOUNDS, PATCHED] if cards else [BOUNDS]
    return [Section("attacked", "Under attack", words, [picture], [table], cards)]
