"""The sections of a page, with their tables: one certification in depth, several beside each other, and trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchproof.geometry import size_words
from patchproof.models import load_checkpoint
from patchproof.report import _plots
from patchproof.report._compare import (
    GUARANTEES,
    MADE,
    TracedRun,
    paper_table,
    rate_note,
    runs_table,
    split_words,
    validated_with,
)
from patchproof.report._counts import (
    FEW_PER_CLASS,
    Comparison,
    Paired,
    attacked_rates,
    by_class,
    enough_per_class,
    holm,
    mask_shares,
    outcomes,
    witness,
)
from patchproof.report._figures import Picture
from patchproof.report._gallery import Gallery, attacked_gallery, make_gallery, worst_masks
from patchproof.report._tables import Cell, Table, duration
from patchproof.runs import Rate, Record, StoredCertification, StoredTraining, find_images
from patchproof.runs._reading import printable
from patchproof.training import STRATEGIES
from patchproof.types import PatchproofError

SHOWN_CLASSES = 20
SHOWN_FAILURES = 10
NAMED = 3
"""Classes, runs or masks that a sentence or cell names."""

WITNESS = (
    "Left the image as the network sees it, right the copy under the masks that decided: those under which it fails, "
    "or for a certified image those with the smallest margin. Masked pixels have the colour they had in the run; the "
    "outlines are drawn for the reader. Evenly spaced from the narrowest margin to the widest."
)
INTERVALS = "Brackets and bands are exact (Clopper–Pearson) 95% intervals."
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
WORST = "Each row is one masked copy that a strategy would train on, chosen with the weights it ended with."
HOLM = "Holm: p corrected for the number of rows tested together."
BORDER = "Where interval and test disagree, as they may at the border of what n images can show, the test decides."
VALIDATED = "Accuracies on the validation images at the best epoch, with exact 95% intervals."


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, figures and tables below it; `key` is its address in the page."""

    key: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    gallery: Gallery | None = None
    wide: bool = False
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Headings with their points."""
    shown: bool = True
    """Whether it is on the page; if not, its tables are files all the same."""


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
    if isinstance(source, str):  # why they are not found
        fallen, gallery = None, Gallery(notice=source)
    else:
        fallen, gallery = attacked_gallery(run, source, images), make_gallery(run, source, images)
    seen = any(witness(run, record)[0] for record in run.good)
    title, words = ("Images and their witnesses", WITNESS) if seen else ("Images", ALONE)
    return [
        head,
        *attacked([run], fallen),
        *classes_of(run),
        margins_of(run),
        cost_of(run),
        Section("gallery", title, [words], gallery=gallery),
        settings,
    ]


def classes_of(run: StoredCertification) -> list[Section]:
    """Accuracies by class; and from the lowest certified accuracy up, why images have no certificate."""
    found, failed, enough = by_class(run), dict[int, list[Record]](), enough_per_class(run)
    rows: list[dict[str, Cell]] = []
    for label, rates in found.items():
        row: dict[str, Cell] = {"class": run.class_name(label), "images": rates["certified"].n}
        rows.append(row | {name: rates[name] for name in reversed(run.rates)})
    classes = Table.of("classes", "Accuracies by class", rows, [rate_note([run])])
    ordered = sorted(classes.rows, key=lambda row: next(cell.rate for cell in row if isinstance(cell, Rate)))
    ends = [*ordered[:SHOWN_CLASSES], *ordered[SHOWN_CLASSES:][-SHOWN_CLASSES:]]
    classes = classes.excerpt(ends, "lowest and the highest certified accuracy")
    for record in outcomes(run)["not certified"]:
        failed.setdefault(record.label, []).append(record)
    alone, masked, rows = "undefended" in run.rates, run.masks is not None, []
    for label in sorted(failed, key=lambda label: (found[label]["certified"].rate, label)):
        records = failed[label]
        row = {"class": run.class_name(label), "not certified": len(records)}
        if alone:
            row["undefended wrong"] = sum(record.undefended is False for record in records)
        if masked:
            shares = list(mask_shares(run, records).items())[:NAMED]
            row["masks"] = ", ".join(f"{number + 1} ({rate.k:,}×)" for number, rate in shares) or None
            wrong = Counter(a for r in records if (a := witness(run, r)[1]) is not None and a != label)
            row["answered"] = next((f"{run.class_name(a)} ({k:,}×)" for a, k in wrong.most_common(1)), None)
        rows.append(row)
    notes = []
    if alone:
        notes.append("Undefended wrong: of these, the images that the classifier misclassifies without any mask.")
    if masked:
        which = "deciding pair of masks" if run.defense == "patchcleanser" else "deciding masks"
        notes.append(f"Masks and answers: the most frequent of the {which}, as far as the run looked, and how often.")
    failures = Table.of("failures", "Where certificates fail", rows, notes)
    failures = failures.excerpt(failures.rows[:SHOWN_FAILURES], "lowest certified accuracy")
    pictures, fails = [_plots.class_picture(run)], _plots.failing_masks_pictures(run)
    return [
        Section("classes", "By class", [INTERVALS], pictures, [classes], shown=enough),
        Section("failures", failures.title, (), fails, [failures], shown=enough and bool(rows)),
    ]


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
    pictures = _plots.histogram_pictures(run, "margins", "Margins", unit, lambda record: record.margin)
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
    pictures = _plots.histogram_pictures(run, "cost", "Passes per image", unit, lambda r: float(r.forwards))
    table = Table.of("cost", "Cost", [{"what": what, "how much": value} for what, value in facts.items()])
    return Section("cost", "Cost", (), pictures, [table])


def attacked(runs: Sequence[StoredCertification], gallery: Gallery | None = None) -> list[Section]:
    """Accuracies, broken certificates and cost of the runs that were attacked; transposed where that is one."""
    chosen = [run for run in runs if run.attacks]
    if not chosen:
        return []
    words, rows, notes = [BOUNDS], list[dict[str, Cell]](), [rate_note(chosen)]
    for run in chosen:
        rates, findings = attacked_rates(run), [r.attack for r in run.attacks if r.attack is not None]
        row: dict[str, Cell] = {"run": run.name} | {w: rates.get(name) for name, w in _plots.ATTACK_NAMES.items()}
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
    if gallery is not None:
        words += [PATCHED] if all(c.patched for _, cards in gallery.groups for c in cards) else [PATCHED, LOST]
    return [Section("attacked", "Under attack", words, [_plots.bounds_picture(chosen)], [table], gallery)]


def side_by_side(traced: Sequence[TracedRun], comparisons: Sequence[Comparison]) -> list[Section]:
    """Certifications, those that can be paired with the baseline against it."""
    pictures, paired = _plots.comparison_pictures(traced), list[Section]()
    if comparisons:
        paired = against_baseline(comparisons, pictures)
    elif pictures:
        paired = [Section("figures", "What changes certified accuracy", (), pictures)]
    # No number twice: rows by strategy have the accuracies of the runs, unless they are only the runs again.
    repeated = not any(one.paper for one in traced) and any(one.strategy is None for one in traced)
    elsewhere = [*MADE, *([] if repeated else ["defended", "certified"])]
    elsewhere += ["strategy"] if all(one.strategy is None for one in traced) else []
    elsewhere += ["folder"] if all(str(one.run.folder.resolve()).endswith(one.run.name) for one in traced) else []
    return [
        Section("comparison", "Strategies", tables=[paper_table(traced)], shown=not repeated),
        *paired,
        *attacked([one.run for one in traced]),
        Section("runs", "The runs", tables=[runs_table(traced).concise(elsewhere)]),
    ]


def against_baseline(comparisons: Sequence[Comparison], pictures: Sequence[Picture]) -> list[Section]:
    """One row per run and accuracy, with the images on which it differs from the baseline; and by class, smallest p
    first. Of several runs the figure is about the runs, of a single one about its classes."""
    one, base, several = comparisons[0], comparisons[0].base, len(comparisons) > 1

    def cells(paired: Paired, corrected: float) -> dict[str, Cell]:
        counts = {"images": paired.n, "gained": paired.gained, "lost": paired.lost}
        return {**counts, "difference in points": paired, "McNemar p": paired.p, "p, Holm": corrected}

    rows: list[dict[str, Cell]] = [
        {"run": c.run.name, "accuracy": name, **cells(c.accuracies[name], c.corrected[name])}
        for name in reversed(base.rates)
        for c in comparisons
        if name in c.accuracies
    ]
    notes = [
        f"Gained: only this run has the image right or certified; lost: only {base.name}. The difference, this run "
        f"minus {base.name}, is over the same images, with Newcombe's 95% interval (method 10); McNemar's test is "
        f"exact. {BORDER}",
        *([HOLM] if several else []),
    ]
    title = f"Against {base.name}" if several else f"{one.run.name} against {base.name}"
    every, drawn = Table.of("paired", title, rows, notes, digits=3), _plots.paired_pictures(comparisons)
    shown, few = every.concise(["run", "p, Holm"]), SHOWN_CLASSES
    if several:
        certified = replace(every, rows=[row for row in every.rows if row[1] == "certified"], whole=every)
        shown, few = certified.concise(["accuracy"]), SHOWN_FAILURES
        pictures, drawn = [*drawn, *pictures], []
    found = []
    for c in comparisons:
        adjusted = holm([paired.p for paired in c.classes.values()])
        for (label, paired), p in zip(c.classes.items(), adjusted, strict=True):
            found.append((paired.p, {"class": base.class_name(label), "run": c.run.name, **cells(paired, p)}))
    ordered = [row for _, row in sorted(found, key=lambda pair: pair[0])]
    table = Table.of("paired-classes", f"Certified against {base.name}, by class", ordered, [HOLM], digits=3)
    classes = table.excerpt(table.rows[:few], "smallest p").concise([] if several else ["run"])
    enough = len(one.classes) > 1 and one.certified.n >= FEW_PER_CLASS * len(one.classes)
    return [
        Section("paired", title, (), pictures, [shown]),
        Section("paired-classes", "By class, on the same images", (), drawn, [classes], shown=enough),
    ]


def trainings(runs: Sequence[StoredTraining]) -> list[Section]:
    """Curves; and what each strategy hides, on the first validation images found, by the checkpoints found."""
    if not runs:
        return []
    rows: list[dict[str, Cell]] = [
        {
            "run": run.name,
            "strategy": run.strategy,
            "extra passes per image": run.search_passes,
            "steps": run.losses[-1][0] if run.losses else 0,
            "epochs": len(run.epochs),
            "seconds": run.seconds,
            "best epoch": run.best.epoch if run.best else None,
            "undefended": run.best.undefended if run.best else None,
            "certified": run.best.certified if run.best else None,
            "certified by": "{} ({})".format(*validated_with(run)),
            "best epoch chosen on": run.selected_on,
        }
        for run in runs
    ]
    table = Table.of("training", "Training", rows, [VALIDATED]).concise()
    sections = [Section("training", "Training", pictures=_plots.training_pictures(runs), tables=[table])]
    source = next((found for run in runs if not isinstance(found := find_images(run), str)), None)
    classifiers = {}
    for run in runs if source else ():
        if run.mask_patch == "3%" and run.strategy in STRATEGIES:
            with suppress(PatchproofError, OSError):
                classifier = load_checkpoint(run.folder / "checkpoint-last").eval()
                classifiers[_plots.line_name(run)] = run.strategy, classifier
    if source is not None and classifiers:
        with suppress(PatchproofError):  # e.g. weights for other classes than the first run's images have
            picture = worst_masks(classifiers, source, seed=0)
            sections.append(Section("worst-masks", "What each strategy hides", [WORST], [picture], wide=True))
    return sections
