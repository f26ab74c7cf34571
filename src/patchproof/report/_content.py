"""What is counted from the records of single runs, the tables of it, and the words around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from patchproof.geometry import size_words
from patchproof.report._tables import Cell, Table, duration
from patchproof.runs import ATTACK_ACCURACIES, Rate, Record, StoredCertification, StoredTraining, Tally, rates
from patchproof.runs._reading import count_words, printable, shortened

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
MOST_CLASSES = 40
"""With more classes, the figure shows the distribution instead."""

FEW_PER_CLASS = 5
"""With fewer images per class on average, and many classes, nothing is shown by class: single images are no rates."""

NAMED = 3
"""Classes, runs or masks that a sentence names."""

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


def outcomes(run: StoredCertification) -> dict[str, list[Record]]:
    good = run.good
    return {"certified": [r for r in good if r.certified], "not certified": [r for r in good if not r.certified]}


def by_class(run: StoredCertification) -> dict[int, dict[str, Rate]]:
    """The accuracies of each label, in the order of the labels."""
    found: dict[int, list[Record]] = {}
    for record in run.good:
        found.setdefault(record.label, []).append(record)
    return {label: rates(found[label]) for label in sorted(found)}


def enough_per_class(run: StoredCertification) -> bool:
    classes = len(by_class(run))
    return classes <= MOST_CLASSES or len(run.good) >= FEW_PER_CLASS * classes


def witness(run: StoredCertification, record: Record) -> tuple[tuple[int, ...], int | None]:
    """The numbers of the masks that decided, each once, and of unions those of their parts; and the label under them.
    None where the record has no witness that fits the run."""
    found = record.evidence.get("witness")
    masks = found.get("masks") if isinstance(found, Mapping) else None
    if run.masks is None or not isinstance(found, Mapping) or not isinstance(masks, list):
        return (), None
    if not all(type(number) is int and 0 <= number < len(run.masks) for number in masks):
        return (), None
    rects, label = (rect for number in masks for rect in run.masks.parts[number]), found.get("label")
    return tuple(dict.fromkeys(map(run.masks.blocks.index, rects))), label if type(label) is int else None


def mask_shares(run: StoredCertification, records: Sequence[Record]) -> dict[int, Rate]:
    """For each mask the share of these images whose deciding masks it is among, most often first."""
    decided = [masks for record in records if (masks := witness(run, record)[0])]
    found = Counter(number for masks in decided for number in masks)
    return {number: Rate(k, len(decided)) for number, k in sorted(found.items(), key=lambda one: (-one[1], one[0]))}


def accuracy_table(run: StoredCertification) -> Table:
    about = meanings(run)
    rows: list[dict[str, Cell]] = [
        {"accuracy": name, "images": f"{r.k:,} of {r.n:,}", "rate (95% interval)": r, "of what": about[name]}
        for name, r in run.rates.items()
    ]
    return Table.of("accuracies", "Accuracies", rows)


def class_table(run: StoredCertification) -> Table:
    rows = []
    for label, found in by_class(run).items():
        row: dict[str, Cell] = {"class": run.class_name(label), "images": found["certified"].n}
        rows.append(row | {name: found[name] for name in reversed(run.rates)})
    note = f"With exact 95% intervals; {guarantee_note([run])}"
    return Table.of("classes", "Accuracies by class", rows, (note,))


def ends(table: Table, count: int) -> Table:
    """The rows with the lowest and with the highest certified accuracy, if there are more than twice as many."""
    if len(table.rows) <= 2 * count:
        return table
    ordered = sorted(table.rows, key=lambda row: next(cell.rate for cell in row if isinstance(cell, Rate)))
    note = f"The {count} lowest and the {count} highest of {len(table.rows):,} classes; tables/{table.key}.csv has all."
    return replace(table, rows=(*ordered[:count], *ordered[-count:]), notes=(*table.notes, note), whole=table)


def failures_table(run: StoredCertification) -> Table:
    """Classes from the lowest certified accuracy up: why their images have no certificate, and under which masks."""
    failed: dict[int, list[Record]] = {}
    for record in outcomes(run)["not certified"]:
        failed.setdefault(record.label, []).append(record)
    alone, masked, found = "undefended" in run.rates, run.masks is not None, by_class(run)
    rows = []
    for label in sorted(failed, key=lambda label: (found[label]["certified"].rate, label)):
        records = failed[label]
        row: dict[str, Cell] = {"class": run.class_name(label), "not certified": len(records)}
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
    return Table.of("failures", "Where certificates fail", rows, notes)


def margin_unit(run: StoredCertification) -> str:
    """Masked copies are compared by their logits; what another defence's margin is measured in is not known."""
    return "margin" if run.masks is None else "margin (logits)"


def margin_table(run: StoredCertification) -> Table:
    heads, rows = {"smallest": 0, "5%": 5, "median": 50, "95%": 95, "largest": 100}, []
    for words, records in outcomes(run).items():
        values = [r.margin for r in records if r.margin is not None]
        row: dict[str, Cell] = {margin_unit(run): words, "images": len(values)}
        rows.append(row | {head: float(np.percentile(values, q)) if values else None for head, q in heads.items()})
    unknown = sum(record.margin is None for record in run.good)
    notes = (f"{unknown:,} images have no margin: it is not a finite number.",) if unknown else ()
    return Table.of("margins", "Margins", rows, notes, digits=3)


def cost_table(run: StoredCertification) -> Table:
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
    return Table.of("cost", "Cost", [{"what": what, "how much": value} for what, value in facts.items()])


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
    return Table.of("settings", "Made with", [{"what": what, "value": printable(v)} for what, v in facts.items()])


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
    notes, rows = [f"Rates with exact 95% intervals; {guarantee_note(runs)}"], []
    for run in runs:
        found, findings = attacked_rates(run), [r.attack for r in run.attacks if r.attack is not None]
        row: dict[str, Cell] = {"run": run.name} | {words: found.get(name) for name, words in ATTACK_NAMES.items()}
        row["certified but broken"] = sum(record.broken for record in run.attacks)
        row["attacked copies"] = sum(one.passes for one in findings)
        rows.append(row)
        tried = sum(one.attacked is not None for one in findings)
        if 0 < tried < len(findings):
            words = f"{tried:,} of {len(findings):,} images were attacked behind the defence"
            notes.append(f"{run.name}: {words}; the others count as clean.")
    if len(rows) == 1:
        rows = [{"what": what, "images": cell} for what, cell in rows[0].items() if what != "run"]
    return Table.of("attacked", "Under attack", rows, notes)


def training_table(runs: Sequence[StoredTraining]) -> Table:
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
        }
        for run in runs
    ]
    note = "On the validation images at the best epoch, double masking with 3×3 masks (recovery), exact 95% intervals."
    chosen = "; ".join(f"{run.name}: {run.selected_on}" for run in runs if run.selected_on)
    return Table.of(
        "training", "Training", rows, (note, f"The best epoch is chosen on {chosen}.") if chosen else (note,)
    )
