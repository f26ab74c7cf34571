"""From run folders to a report, and from a report to files: one HTML page, in which nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from patchproof.models import load_checkpoint
from patchproof.report import _compare, _conclude, _content, _paired, _plots
from patchproof.report._figures import Picture
from patchproof.report._gallery import Gallery, attacked_gallery, make_gallery, worst_masks
from patchproof.report._tables import RENDERERS, Table, interval_words, percent
from patchproof.runs import (
    Rate,
    StoredCertification,
    StoredTraining,
    dump_json,
    find_images,
    read_runs,
    write_atomically,
)
from patchproof.runs._reading import StoredRun, count_words, printable
from patchproof.training import STRATEGIES
from patchproof.types import InputError, PatchproofError
from patchproof.version import __version__

GENERATOR = "patchproof report"
"""What the page's head says it was made by; an earlier report is known by it."""

SHOWN_CLASSES = 20
SHOWN_FAILURES = 10
MOST_IMAGES = 100
MOST_NAMES = 4
"""Of more runs that share a notice, not all are named."""

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


@dataclass(frozen=True)
class Options:
    """`images` is how many certified images, and how many others, are shown at most; `dataset` and `data_dir` are the
    new location of the images, if they moved; the other runs are compared with `baseline`, by default the first."""

    title: str | None = None
    dataset: str | None = None
    data_dir: Path | None = None
    images: int = 8
    baseline: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.images <= MOST_IMAGES:
            raise InputError(f"images must be 0 to {MOST_IMAGES} of each kind, not {self.images}")


@dataclass(frozen=True)
class Notice:
    """Something a reader must know before the numbers; `run` is "" when it is about all of them."""

    run: str
    text: str


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

    @property
    def beside(self) -> bool:
        """One figure and one table stand side by side where the screen is wide enough."""
        return len(self.pictures) == len(self.tables) == 1


@dataclass(frozen=True)
class Report:
    """A page, and the tables and figures in it as files of their own."""

    title: str
    subtitle: str
    notices: Sequence[Notice]
    tiles: Sequence[tuple[str, str, Rate]]
    """Accuracies in large type: name, meaning, rate."""
    sections: Sequence[Section]
    tables: Sequence[Table]
    conclusion: _conclude.Conclusion

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]

    def html(self) -> str:
        """Every text is escaped, only the figures' own SVG is not."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters["svg"] = lambda picture: Markup(picture.inline)
        environment.filters |= {"percent": percent, "interval": interval_words}
        template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
        return template.render(page=self, groups=notice_groups(self.notices), generator=GENERATOR, version=__version__)

    def write(self, folder: Path) -> Path:
        """Put everything into `folder`, in place of the report that may be there; returns the page's path."""
        page = folder / "index.html"
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; give a folder for the report")
        if folder.is_dir() and any(folder.iterdir()):
            ours = page.is_file() and GENERATOR in page.read_text("utf-8", errors="replace")[:2000]
            if not ours:
                raise InputError(f"{folder} holds other things than a report; choose another folder")
        for name, endings in (("figures", ("svg", "png")), ("tables", tuple(RENDERERS))):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for ending in endings:
                for old in (folder / name).glob(f"*.{ending}"):
                    old.unlink()
        for picture in self.pictures:
            (folder / "figures" / f"{picture.key}.svg").write_text(picture.svg_file, encoding="utf-8")
            (folder / "figures" / f"{picture.key}.png").write_bytes(picture.png)
        for table in self.tables:
            for ending, text in RENDERERS.items():
                (folder / "tables" / f"{table.key}.{ending}").write_text(text(table), encoding="utf-8", newline="\n")
        facts = {
            "title": self.title,
            "subtitle": self.subtitle,
            "notices": [vars(notice) for notice in self.notices],
            "accuracies": {name: rate.as_dict() for name, _, rate in self.tiles},
            "verdict": list(self.conclusion.verdict),
            "next_steps": list(self.conclusion.steps),
            "excluded": list(self.conclusion.excludes),
        }
        write_atomically(folder / "report.json", dump_json(facts))
        write_atomically(page, self.html())
        return page


def notice_groups(notices: Sequence[Notice]) -> dict[str, list[str]]:
    """Names of runs -> their notices; a notice that several runs share appears once."""
    runs: dict[str, list[str]] = {}
    for notice in notices:
        runs.setdefault(notice.text, []).append(notice.run)
    groups: dict[str, list[str]] = {}
    for text, names in runs.items():
        more = f" and {len(names) - MOST_NAMES + 1} more" if len(names) > MOST_NAMES else ""
        groups.setdefault(", ".join(names[: MOST_NAMES - 1] if more else names) + more, []).append(text)
    return groups


def build_report(folders: Sequence[Path], options: Options | None = None) -> Report:
    """One certification in depth, or several side by side; training runs with their curves."""
    chosen = options or Options()
    if not folders:
        raise InputError("name at least one run folder")
    certified, trained = read_runs(folders)
    traced = _compare.trace(certified, trained)
    several = len(traced) > 1
    if chosen.baseline is not None and not several:
        raise InputError(
            f"baseline needs several certifications to compare, and there is {'one' if traced else 'none'}"
        )
    notices = [Notice("", text) for text in _compare.mixed_notices(traced)]
    notices += [Notice(run.name, text) for run in certified for text in _content.attack_notices(run)]
    every: list[StoredRun] = [*certified, *trained]
    notices += [Notice(run.name, text) for run in every for text in run.notices]
    for one in traced:  # a strategy that is not known matters only where rows are named by it
        if one.doubt and (several or one.strategy):
            notices.append(Notice(one.run.name, one.doubt))
    if several:
        sections, conclusion = _side_by_side(traced, chosen.baseline)
        tiles: list[tuple[str, str, Rate]] = []
    else:
        sections = [section for one in traced for section in _details(one, chosen)]
        tiles = [(name, _content.meanings(run)[name], rate) for run in certified for name, rate in run.rates.items()]
        conclusion = _conclude.conclude_one(traced[0]) if traced else _conclude.conclude_training(trained)
    lists = [("Verdict", conclusion.verdict), ("Next steps", conclusion.steps)]
    lists += [("What the guarantee excludes", conclusion.excludes)]
    points = [(head, points) for head, points in lists if points]
    sections += [*_training(trained), Section("conclusion", "Conclusion", lists=points)]
    title, subtitle = _titles(certified, trained)
    tables = [table.whole or table for section in sections for table in section.tables if table.rows]
    shown = [section for section in sections if section.shown]
    return Report(printable(chosen.title or title), subtitle, notices, tiles, shown, tables, conclusion)


def _side_by_side(
    traced: Sequence[_compare.TracedRun], baseline: Path | None
) -> tuple[list[Section], _conclude.Conclusion]:
    """Certifications paired with the baseline, and what follows."""
    base = traced[0]
    if baseline is not None:
        same = [one for one in traced if one.run.folder.resolve() == baseline.resolve()]
        if not same:
            raise InputError(f"baseline must be one of the certifications in the report, not {baseline}")
        base = same[0]
    others = [one.run for one in traced if one is not base]
    unpaired = {run.name: reason for run in others if (reason := _paired.why_not_paired(base.run, run)) is not None}
    comparisons = _paired.compare(base.run, *(run for run in others if run.name not in unpaired))
    paired, pictures = list[Section](), _plots.comparison_pictures(traced)
    if comparisons:
        shown = every = _compare.comparison_table(comparisons, [*base.run.rates][::-1])
        drawn, few = _plots.paired_pictures(comparisons), SHOWN_CLASSES
        if len(comparisons) > 1:  # then the figure is about the runs, else about the classes
            certified = _compare.concise(_compare.comparison_table(comparisons, ["certified"]), ["accuracy"])
            shown, few = replace(certified, whole=every), SHOWN_FAILURES
            pictures, drawn = [*drawn, *pictures], []
        classes = [_compare.class_comparison_table(comparisons).first(few, "smallest p")]
        enough = len(comparisons[0].classes) > 1 and _content.enough_per_class(base.run)
        paired = [
            Section("paired", every.title, (), pictures, [shown]),
            Section("paired-classes", "By class, on the same images", (), drawn, classes, shown=enough),
        ]
    elif pictures:
        paired.append(Section("figures", "What changes certified accuracy", (), pictures))
    # No number twice: rows by strategy have the accuracies of the runs, unless they are only the runs again.
    repeated = not any(one.paper for one in traced) and any(one.strategy is None for one in traced)
    elsewhere = [*_compare.MADE, *([] if repeated else ["defended", "certified"])]
    elsewhere += ["strategy"] if all(one.strategy is None for one in traced) else []
    sections = [
        Section("comparison", "Strategies", tables=[_compare.paper_table(traced)], shown=not repeated),
        *paired,
        *_attacked([one.run for one in traced]),
        Section("runs", "The runs", tables=[_compare.concise(_compare.runs_table(traced), elsewhere)]),
    ]
    return sections, _conclude.conclude_several(traced, base, comparisons, unpaired)


def _titles(certified: Sequence[StoredCertification], trained: Sequence[StoredTraining]) -> tuple[str, str]:
    if len(certified) == 1:
        run = certified[0]
        threat = f"{'one patch of ' * (run.patches == 1)}{run.patch_words} anywhere on the image"
        words = f"Certified {run.guarantee} against {threat}; {run.defense}, {run.masks_words}; run {run.name}"
        return f"{run.defense if run.manifest.get('model') is None else run.architecture} on {run.dataset}", words
    if not certified:
        return f"Training: {trained[0].name}" if len(trained) == 1 else f"{len(trained)} training runs", ""
    more = f"With {count_words(len(trained), 'training run', 'training runs')}" if trained else ""
    return f"{len(certified)} certifications side by side", more


def _details(one: _compare.TracedRun, options: Options) -> list[Section]:
    """One certification in depth."""
    run = one.run
    # On the page the accuracies stand in large type.
    accuracies = Section("accuracies", "Accuracies", tables=[_content.accuracy_table(run)], shown=False)
    settings = Section("settings", "Made with", tables=[_content.settings_table(run, one.strategy)])
    if not run.good:
        return [accuracies, settings]
    source = find_images(run, options.dataset, options.data_dir)
    if isinstance(source, str):
        fallen, gallery = None, Gallery(notice=source)
    else:
        fallen, gallery = attacked_gallery(run, source, options.images), make_gallery(run, source, options.images)
    seen = any(_content.witness(run, record)[0] for record in run.good)
    title, words = ("Images and their witnesses", WITNESS) if seen else ("Images", ALONE)
    classes = _content.ends(_content.class_table(run), SHOWN_CLASSES)
    failures = _content.failures_table(run).first(SHOWN_FAILURES, "lowest certified accuracy")
    enough, fails = _content.enough_per_class(run), _plots.failing_masks_pictures(run)
    margin_words = [TWO_MASK_MARGIN if run.defense == "patchcleanser" else MARGIN, *([] if run.exhaustive else [EARLY])]
    unit, histograms = _content.margin_unit(run), _plots.histogram_pictures
    margins = histograms(run, "margins", "Margins", unit, lambda record: record.margin)
    passes = histograms(run, "cost", "Passes per image", "passes per image", lambda record: float(record.forwards))
    return [
        accuracies,
        *_attacked([run], fallen),
        Section("classes", "By class", [INTERVALS], [_plots.class_picture(run)], [classes], shown=enough),
        Section("failures", failures.title, (), fails, [failures], shown=enough and bool(failures.rows)),
        Section("margins", "Margins", margin_words, margins, [_content.margin_table(run)]),
        Section("cost", "Cost", (), passes, [_content.cost_table(run)]),
        Section("gallery", title, [words], gallery=gallery),
        settings,
    ]


def _attacked(runs: Sequence[StoredCertification], gallery: Gallery | None = None) -> list[Section]:
    """Of the runs that were attacked."""
    chosen = [run for run in runs if run.attacks]
    if not chosen:
        return []
    words = [BOUNDS]
    if gallery is not None:
        blank = any(not card.patched for _, cards in gallery.groups for card in cards)
        words += [PATCHED, LOST] if blank else [PATCHED]
    table = _content.attack_table(chosen)
    if len(runs) == 1:  # the other rates stand above in large type
        table = replace(table, rows=[row for row in table.rows if row[0] not in runs[0].rates], whole=table)
    return [Section("attacked", "Under attack", words, [_plots.bounds_picture(chosen)], [table], gallery)]


def _training(runs: Sequence[StoredTraining]) -> list[Section]:
    """Curves; and what each strategy hides, on the first validation images found, by the checkpoints found."""
    if not runs:
        return []
    tables = [_content.training_table(runs)]
    sections = [Section("training", "Training", pictures=_plots.training_pictures(runs), tables=tables)]
    source = next((found for run in runs if not isinstance(found := find_images(run), str)), None)
    classifiers = {}
    for run in runs:
        if source is not None and run.mask_patch == "3%" and run.strategy in STRATEGIES:
            try:
                classifier = load_checkpoint(run.folder / "checkpoint-last").eval()
            except (PatchproofError, OSError):
                continue
            classifiers[_plots.line_name(run)] = run.strategy, classifier
    if source is not None and classifiers:
        try:
            picture = worst_masks(classifiers, source, seed=0)
        except PatchproofError:  # e.g. weights for other classes than the first run's images have
            return sections
        sections.append(Section("worst-masks", "What each strategy hides", [WORST], [picture], wide=True))
    return sections
