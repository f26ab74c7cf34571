"""From run folders to a report, and from a report to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchproof.data import ImageSource, open_dataset
from patchproof.models import ImageClassifier, load_checkpoint
from patchproof.records import write_atomically
from patchproof.report._attacked import (
    CHANGED,
    WORDS,
    attack_notices,
    attack_table,
    attacked_runs,
    bounds_picture,
    changed,
)
from patchproof.report._compare import Entry, concise, mixed_notices, paper_table, runs_table
from patchproof.report._facts import look
from patchproof.report._figures import Picture
from patchproof.report._gallery import attacked_gallery, make_gallery
from patchproof.report._lineage import find_trainings
from patchproof.report._page import GENERATOR, Notice, Page, Section, Tile, render
from patchproof.report._runs import CertifyRun, TrainRun, load_runs
from patchproof.report._single import (
    EARLY,
    INTERVALS,
    MARGIN,
    MEANING,
    accuracy_table,
    class_picture,
    class_table,
    cost_picture,
    cost_table,
    ends,
    margin_picture,
    margin_table,
    settings_table,
)
from patchproof.report._tables import RENDERERS, Table
from patchproof.report._text import count_words, printable
from patchproof.report._training import line_name, training_pictures, training_table
from patchproof.report._trends import comparison_pictures
from patchproof.report._worst_masks import worst_masks
from patchproof.types import InputError, PatchproofError

SHOWN_CLASSES = 20
MOST_IMAGES = 100
TRAINING_PATCH = "3%"
CARDS = (
    "Left the image as the network gets it, right the copy under the two masks that decided: the pair that fails, or "
    "of a certified image the pair with the least margin. Masked pixels have the colour they had in the run; the "
    "outlines are drawn for the reader. Evenly spaced from the narrowest margin to the widest."
)


@dataclass(frozen=True)
class Options:
    """`images` is how many certified images, and how many failures, are shown at most."""

    title: str | None = None
    dataset: str | None = None
    data_dir: Path | None = None
    images: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.images <= MOST_IMAGES:
            raise InputError(f"--images must be 0 to {MOST_IMAGES} of each kind, not {self.images}")


@dataclass(frozen=True)
class Report:
    """A page, and the tables and figures in it as files of their own."""

    page: Page
    tables: tuple[Table, ...]

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.page.sections for picture in section.pictures]

    @property
    def notices(self) -> Sequence[Notice]:
        return self.page.notices

    def write(self, folder: Path) -> Path:
        """Put everything into `folder`, in place of the report that may be there; returns the page's path."""
        _require_ours(folder)
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
        write_atomically(folder / "index.html", render(self.page))
        return folder / "index.html"


def _require_ours(folder: Path) -> None:
    """Only nothing, an empty folder or an earlier report is written over."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for the report with --output")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    page = folder / "index.html"
    if not (page.is_file() and GENERATOR in page.read_text("utf-8", errors="replace")[:2000]):
        raise InputError(f"{folder} holds other things than a report; choose another --output")


def build_report(folders: Sequence[Path], options: Options | None = None) -> Report:
    """One certification in depth, or several side by side; training runs with their curves."""
    chosen = options or Options()
    if not folders:
        raise InputError(
            "name at least one run folder, e.g. `patchproof report runs/…`; `patchproof ls runs` lists them"
        )
    certified, trained = load_runs(folders)
    entries = [
        Entry(run, training) for run, training in zip(certified, find_trainings(certified, trained), strict=True)
    ]
    loaded: list[CertifyRun | TrainRun] = [*certified, *trained]
    notices = [Notice(run.name, text) for run in certified for text in attack_notices(run)]
    notices += [Notice(run.name, text) for run in loaded for text in run.notices]
    several = len(entries) > 1
    notices += [Notice(e.run.name, e.training.doubt) for e in entries if e.training.doubt and _matters(e, several)]
    if several:
        notices = [Notice("", text) for text in mixed_notices(entries)] + notices
    sections = _comparison(entries) if several else [s for entry in entries for s in _details(entry, chosen)]
    sections += _training(trained)
    page = Page(
        title=printable(chosen.title or _title(certified, trained)),
        subtitle=_subtitle(certified, trained),
        notices=notices,
        tiles=[] if several else [Tile(k, MEANING[k], rate) for run in certified for k, rate in run.rates.items()],
        sections=[section for section in sections if section],
    )
    return Report(page, tuple(_whole_tables(entries, sections)))


def _matters(entry: Entry, several: bool) -> bool:
    """A strategy that is guessed, always; one that is not known, only where rows are named by it."""
    return several or entry.training.strategy is not None


def _whole_tables(entries: Sequence[Entry], sections: Sequence[Section]) -> list[Table]:
    """Each table once, the accuracies with them, and with all rows and columns those that the page shows in part."""
    alone = entries[0].run if len(entries) == 1 else None
    tables = (runs_table(entries),) if alone is None else (accuracy_table(alone), class_table(alone))
    whole = {table.key: table for table in tables if entries}
    return list((whole | {t.key: whole.get(t.key, t) for s in sections for t in s.tables}).values())


def _title(certified: Sequence[CertifyRun], trained: Sequence[TrainRun]) -> str:
    if len(certified) == 1:
        return f"{certified[0].facts.architecture} on {certified[0].facts.dataset}"
    if certified:
        return f"{len(certified)} certifications side by side"
    return f"Training: {trained[0].name}" if len(trained) == 1 else f"{len(trained)} training runs"


def _subtitle(certified: Sequence[CertifyRun], trained: Sequence[TrainRun]) -> str:
    if len(certified) == 1:
        facts = certified[0].facts
        return f"One patch of {facts.patch_words} anywhere on the image, {facts.masks_words}; run {certified[0].name}"
    parts = [count_words(len(certified), "certification", "certifications")] if certified else []
    parts += [count_words(len(trained), "training run", "training runs")] if trained else []
    return " and ".join(parts)


def _details(entry: Entry, options: Options) -> list[Section]:
    run = entry.run
    margin_words = (MARGIN, EARLY) if not run.facts.exhaustive else (MARGIN,)
    settings = Section("settings", "Made with", tables=(settings_table(run, entry.training),))
    if not run.good:
        return [settings]
    gallery = make_gallery(run, options.images, dataset=options.dataset, data_dir=options.data_dir)
    return [
        *_attacked([run], options),
        Section(
            "classes",
            "By class",
            (INTERVALS,),
            (class_picture(run),),
            (ends(class_table(run), SHOWN_CLASSES),),
        ),
        Section("margins", "Margins", margin_words, _present(margin_picture(run)), (margin_table(run),)),
        Section("cost", "Cost", (), _present(cost_picture(run)), (cost_table(run),)),
        Section("gallery", "Images and their witnesses", (CARDS,), gallery=gallery),
        settings,
    ]


def _attacked(runs: Sequence[CertifyRun], options: Options | None = None) -> list[Section]:
    """Of runs that were attacked; with options, images that fell too."""
    chosen = attacked_runs(runs)
    if not chosen:
        return []
    gallery = None
    if options is not None:
        fallen, count = changed(chosen[0]), options.images
        gallery = attacked_gallery(chosen[0], fallen, count, dataset=options.dataset, data_dir=options.data_dir)
    words = (WORDS, CHANGED) if gallery else (WORDS,)
    return [Section("attacked", "Under attack", words, (bounds_picture(chosen),), (attack_table(chosen),), gallery)]


def _present(picture: Picture | None) -> tuple[Picture, ...]:
    return () if picture is None else (picture,)


def _comparison(entries: Sequence[Entry]) -> list[Section]:
    return [
        Section("comparison", "Strategies", tables=(paper_table(entries),)),
        Section("figures", "What moves certified accuracy", (), tuple(comparison_pictures(entries))),
        *_attacked([entry.run for entry in entries]),
        Section("runs", "The runs", tables=(concise(runs_table(entries)),)),
    ]


def _training(runs: Sequence[TrainRun]) -> list[Section]:
    if not runs:
        return []
    picture = _worst_masks(runs)
    words = "Each row is one masked copy that a strategy would train on, chosen with the weights it ended with."
    return [
        Section("training", "Training", (), tuple(training_pictures(runs)), (training_table(runs),)),
        Section("worst-masks", "What each strategy hides", (words,), _present(picture), wide=True),
    ]


def _worst_masks(runs: Sequence[TrainRun]) -> Picture | None:
    """On the validation images of the first run whose images and weights are still there."""
    classifiers = {}
    for run in runs:
        classifier = _trained_classifier(run)
        if classifier is not None and run.strategy is not None:
            classifiers[line_name(run)] = run.strategy, classifier
    source = next((found for found in map(_validation_images, runs) if found is not None), None)
    if source is None or not classifiers:
        return None
    try:
        return worst_masks(classifiers, source, seed=0)
    except PatchproofError:  # e.g. weights for other classes than the first run's images have
        return None


def _trained_classifier(run: TrainRun) -> ImageClassifier | None:
    if look(run.manifest, "identity", "mask_patch") != TRAINING_PATCH:
        return None
    try:
        return load_checkpoint(run.folder / "checkpoint-last").eval()
    except (PatchproofError, OSError):
        return None


def _validation_images(run: TrainRun) -> ImageSource | None:
    """The images the run validated on, if they are where they were and the same."""
    config = look(run.manifest, "config")
    name = look(config or {}, "validation") or look(config or {}, "dataset")
    place = look(config or {}, "data_dir")
    try:
        source = open_dataset(str(name), data_dir=Path(place) if isinstance(place, str) else None)
        same = source.listing_sha256() == look(run.manifest, "identity", "validation_sha256")
    except (PatchproofError, OSError):
        return None
    return source if same else None
