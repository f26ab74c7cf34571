"""What a report says about single runs: tables, and the words around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from patchproof.geometry import size_words
from patchproof.report._tables import Cell, Column, Table, duration
from patchproof.runs import ATTACK_ACCURACIES, Rate, Record, StoredCertification, StoredTraining, Tally, rates
from patchproof.runs._reading import count_words, printable, shortened

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
MARGIN = "The margin says how far the certificate is from failing; it is negative where it failed."
TWO_MASK_MARGIN = (
    "The margin is the smallest lead of the label's logit over the runner-up among all pairs of masks. Negative: some "
    "pair makes the classifier answer another label."
)
EARLY = "Where an image is given up at its first failure, its margin bounds the smallest from above."
MOST_CLASSES = 40
"""With more classes, the figure shows the distribution instead."""

ATTACK_NAMES = {
    "undefended": "undefended",
    "undefended_attacked": "undefended, attacked",
    "defended": "defended",
    "attacked": "defended, attacked",
    "certified": "certified",
}


def guarantee_note(runs: Iterable[StoredCertification]) -> str:
    """What `certified` means in these runs."""
    found = sorted({run.guarantee for run in runs})
    return "; ".join(f"certified ({guarantee}) = {GUARANTEES[guarantee]}" for guarantee in found) + "."


def guarantee_words(run: StoredCertification) -> str:
    """What a certificate of this run promises."""
    return GUARANTEES[run.guarantee].replace("such patch", "such patch" if run.patches == 1 else "two such patches")


def meanings(run: StoredCertification) -> dict[str, str]:
    """What each accuracy is about."""
    through = "double masking" if run.defense == "patchcleanser" else f"the defence {run.defense}"
    return {
        "undefended": "clean images, the classifier alone",
        "defended": f"clean images, through {through}",
        "certified": f"{run.guarantee}: {guarantee_words(run)}, provably",
    }


def margin_words(run: StoredCertification) -> tuple[str, ...]:
    words = TWO_MASK_MARGIN if run.defense == "patchcleanser" else MARGIN
    return (words,) if run.exhaustive else (words, EARLY)


def accuracy_table(run: StoredCertification) -> Table:
    columns = [Column(head) for head in ("accuracy", "images", "rate (95% interval)", "of what")]
    rows = [(name, f"{r.k:,} of {r.n:,}", r, meanings(run)[name]) for name, r in run.rates.items()]
    return Table("accuracies", "Accuracies", columns, rows)


def by_class(run: StoredCertification) -> dict[int, dict[str, Rate]]:
    """The accuracies of each label, in the order of the labels."""
    found: dict[int, list[Record]] = {}
    for record in run.good:
        found.setdefault(record.label, []).append(record)
    return {label: rates(found[label]) for label in sorted(found)}


def class_table(run: StoredCertification) -> Table:
    names = list(run.rates)[::-1]
    rows: list[tuple[Cell, ...]] = []
    for label, found in by_class(run).items():
        rows.append((run.class_name(label), found["certified"].n, *(found[name] for name in names)))
    note = f"With exact 95% intervals; {guarantee_note([run])}"
    return Table(
        "classes", "Accuracies by class", [Column(head) for head in ("class", "images", *names)], rows, (note,)
    )


def ends(table: Table, count: int) -> Table:
    """The rows with the lowest and with the highest certified accuracy, if there are more than twice as many."""
    if len(table.rows) <= 2 * count:
        return table
    ordered = sorted(table.rows, key=lambda row: next(cell.rate for cell in row if isinstance(cell, Rate)))
    note = f"The {count} lowest and the {count} highest of {len(table.rows):,} classes; tables/{table.key}.csv has all."
    rows = (*ordered[:count], *ordered[-count:])
    return Table(table.key, table.title, table.columns, rows, (*table.notes, note))


def first_rows(table: Table, count: int, which: str) -> Table:
    """The first rows alone, if there are more; the note says by what they were chosen."""
    if len(table.rows) <= count:
        return table
    note = f"The {count} of {len(table.rows):,} with the {which}; tables/{table.key}.csv has all."
    return Table(table.key, table.title, table.columns, table.rows[:count], (*table.notes, note))


def outcomes(run: StoredCertification) -> dict[str, list[Record]]:
    good = run.good
    return {"certified": [r for r in good if r.certified], "not certified": [r for r in good if not r.certified]}


def margin_unit(run: StoredCertification) -> str:
    """Masked copies are compared by their logits; what another defence's margin is measured in is not known."""
    return "margin" if run.masks is None else "margin (logits)"


def margin_table(run: StoredCertification) -> Table:
    heads = ("smallest", "5%", "median", "95%", "largest")
    columns = (Column(margin_unit(run)), Column("images"), *(Column(head, digits=3) for head in heads))
    rows: list[tuple[Cell, ...]] = []
    for words, records in outcomes(run).items():
        values = [r.margin for r in records if r.margin is not None]
        found = np.percentile(values, [0, 5, 50, 95, 100]).tolist() if values else [None] * 5
        rows.append((words, len(values), *found))
    unknown = sum(record.margin is None for record in run.good)
    notes = (f"{unknown:,} images have no margin: it is not a finite number.",) if unknown else ()
    return Table("margins", "Margins", columns, rows, notes)


def cost_table(run: StoredCertification) -> Table:
    passes = [record.forwards for record in run.good]
    smallest, median, high, largest = np.percentile(passes, [0, 50, 95, 100]).tolist()
    rows = [
        ("passes, all images", f"{sum(passes):,}"),
        ("passes per image, mean", f"{sum(passes) / len(passes):,.1f}"),
        ("median", f"{median:,.0f}"),
        ("from, to", f"{smallest:,.0f} to {largest:,.0f}"),
        ("95% of images take at most", f"{high:,.0f}"),
    ]
    if run.defense == "patchcleanser" and run.masks is not None:
        rows.append(("different masked copies per image", f"{len(run.masks.unions):,}"))
    if run.seconds:
        rows.append(("time", duration(run.seconds)))
        each = run.seconds / len(passes)
        rows.append(("images per second", f"{1 / each:,.1f}") if each < 1 else ("time per image", duration(each)))
    return Table("cost", "Cost", (Column("what"), Column("how much")), rows)


def split_words(run: StoredCertification) -> str:
    return printable(str(run.manifest["data"].get("split") or "not named"))


def settings_table(run: StoredCertification, strategy: str | None) -> Table:
    facts = {
        "data set": run.dataset,
        "split": split_words(run),
        "images": f"{run.planned:,} of {run.available:,}",
        "architecture": run.architecture,
        "weights": run.weights or "not named",
        "sha256 of the weights": run.weights_sha256 or "not known",
        "trained on the masks of": strategy or "no training run is known",
        "network input": "unknown" if run.image_size is None else f"{size_words(run.image_size)} pixels",
        "patch": run.patch_words,
        "defence": run.defense,
        "guarantee": f"{run.guarantee}: {guarantee_words(run)}",
        "masks": run.masks_words,
        "smallest margin that counts (τ)": "not measured" if run.tau is None else f"{run.tau:.3g} logits (float32)",
        "precision": run.precision,
        "device": run.device,
        "date": str(run.manifest.get("date") or "not recorded"),
        "commit": str(run.manifest.get("commit") or "not recorded"),
        "patchproof": str((run.manifest.get("versions") or {}).get("patchproof") or "not recorded"),
        "folder": str(run.folder),
    }
    rows = [(what, printable(value)) for what, value in facts.items()]
    return Table("settings", "Made with", (Column("what"), Column("value")), rows)


def attacked_rates(run: StoredCertification) -> dict[str, Rate]:
    """All five over the same images: one that was not attacked counts with its clean answer, so the rate stays an upper
    bound. What was not attacked at all, or has no clean answers, has no rate."""
    found = Tally(ATTACK_ACCURACIES).add(run.attacks).rates()
    for name, clean in (("undefended_attacked", "undefended"), ("attacked", "defended")):
        if found[name].n:
            answers = [r.finding(clean) if r.finding(name) is None else r.finding(name) for r in run.attacks]
            found[name] = Rate(sum(map(bool, answers)), len(answers))
    return {name: rate for name, rate in found.items() if rate.n}


def attack_notices(run: StoredCertification) -> list[str]:
    """Broken certificates, and records without attack findings."""
    notices = []
    broken = [str(record.index) for record in run.attacks if record.broken]
    if broken:
        words = count_words(len(broken), "certified image was", "certified images were")
        which = shortened(", ".join(broken), 60)
        rule = "which a certificate rules out"
        notices.append(f"{words} broken by a patch, {rule}: image {which}; see broken/ in the run's folder")
    silent = len(run.good) - len(run.attacks)
    if run.attacks and silent:
        words = count_words(silent, "record says", "records say")
        notices.append(f"{words} nothing about attacks; the accuracies under attack leave them out")
    return notices


def attack_table(runs: Sequence[StoredCertification]) -> Table:
    """Accuracies, broken certificates and cost; transposed where there is one run."""
    heads = ("run", *ATTACK_NAMES.values(), "certified but broken", "attacked copies")
    notes, rows = [f"Rates with exact 95% intervals; {guarantee_note(runs)}"], []
    for run in runs:
        found, findings = attacked_rates(run), [r.attack for r in run.attacks if r.attack is not None]
        passes, broken = sum(one.passes for one in findings), sum(record.broken for record in run.attacks)
        rows.append((run.name, *(found.get(name) for name in ATTACK_NAMES), broken, passes))
        tried = sum(one.attacked is not None for one in findings)
        if 0 < tried < len(findings):
            words = f"{tried:,} of {len(findings):,} images were attacked behind the defence"
            notes.append(f"{run.name}: {words}; the others count as clean.")
    if len(rows) > 1:
        return Table("attacked", "Under attack", [Column(head) for head in heads], rows, notes)
    pairs = list(zip(heads[1:], rows[0][1:], strict=True))
    return Table("attacked", "Under attack", (Column("what"), Column("images")), pairs, notes)


def training_table(runs: Sequence[StoredTraining]) -> Table:
    heads = ("run", "strategy", "extra passes per image", "steps", "epochs", "seconds", "best epoch")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        best = run.best
        found = (best.epoch, best.undefended, best.certified) if best else (None, None, None)
        steps = run.losses[-1][0] if run.losses else 0
        rows.append((run.name, run.strategy, run.search_passes, steps, len(run.epochs), run.seconds, *found))
    note = "On the validation images at the best epoch, double masking with 3×3 masks (recovery), exact 95% intervals."
    chosen = "; ".join(f"{run.name}: {run.selected_on}" for run in runs if run.selected_on)
    notes = (note, f"The best epoch is chosen on {chosen}.") if chosen else (note,)
    columns = [Column(head) for head in (*heads, "undefended", "certified")]
    return Table("training", "Training", columns, rows, notes)
