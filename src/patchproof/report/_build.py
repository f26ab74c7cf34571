"""Reports from run folders, written as one HTML page that loads nothing, with its tables and figures as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from patchproof.report._certification import meanings, one_certification
from patchproof.report._compare import side_by_side
from patchproof.report._conclude import Conclusion, about_run, about_runs, about_trainings, conclude
from patchproof.report._counts import compare, trace, why_not_paired
from patchproof.report._figures import Picture
from patchproof.report._gallery import SMALL
from patchproof.report._tables import LONG, RENDERERS, Section, Table, interval_words, percent
from patchproof.report._training import trainings
from patchproof.runs import (
    Rate,
    StoredCertification,
    StoredTraining,
    dump_json,
    one_class_words,
    read_runs,
    write_atomically,
)
from patchproof.types import InputError, count_words, printable, shortened
from patchproof.version import __version__

GENERATOR = "patchproof report"
"""Program named in the head of the page; only a folder with such a page is written over."""

MOST_IMAGES = 100
MOST_NAMES = 4
"""Most runs that are named above a notice which they share."""


@dataclass(frozen=True)
class Options:
    """Settings of a report.

    At most `images` certified images, and as many others, are shown. `dataset` and `data_dir` are the new location of
    the images, if they moved. Runs are compared with `baseline`, by default the first certification.
    """

    title: str | None = None
    dataset: str | None = None
    data_dir: Path | None = None
    images: int = 8
    baseline: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.images <= MOST_IMAGES:
            raise InputError(f"images must be 0 to {MOST_IMAGES} of each kind, not {self.images}")


@dataclass(frozen=True)
class Report:
    """A page, and its tables and figures.

    `notices` are what a reader must know before the numbers: `text` and the `run` that it is about ("" for all).
    `tiles` are accuracies in large type: name, meaning, rate.
    """

    title: str
    subtitle: str
    notices: Sequence[Mapping[str, str]]
    tiles: Sequence[tuple[str, str, Rate]]
    sections: Sequence[Section]
    tables: Sequence[Table]
    conclusion: Conclusion

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]

    def html(self) -> str:
        """The page; every text is escaped, only the SVG of the figures is inserted as it is."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters["svg"] = lambda picture: Markup(picture.inline)
        environment.filters |= {"percent": percent, "interval": interval_words}
        template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
        groups = notice_groups(self.notices)
        return template.render(
            page=self, groups=groups, small=SMALL, long=LONG, generator=GENERATOR, version=__version__
        )

    def write(self, folder: Path | str) -> Path:
        """Write everything into `folder`, in place of an earlier report, and return the path of the page."""
        folder = Path(folder)
        page = folder / "index.html"
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; give a folder for the report")
        ours = page.is_file() and GENERATOR in page.read_text("utf-8", errors="replace")[:2000]
        if folder.is_dir() and any(folder.iterdir()) and not ours:
            raise InputError(f"{folder} holds other things than a report; choose another folder")
        contents = {f"figures/{picture.key}.svg": picture.svg_file.encode() for picture in self.pictures}
        contents |= {f"figures/{picture.key}.png": picture.png for picture in self.pictures}
        for ending, text in RENDERERS.items():
            contents |= {f"tables/{table.key}.{ending}": text(table).encode() for table in self.tables}
        for part, endings in (("figures", ("svg", "png")), ("tables", RENDERERS)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            for old in (folder / part).iterdir():
                if old.suffix[1:] in endings:
                    old.unlink()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        facts = {
            "title": self.title,
            "subtitle": self.subtitle,
            "notices": self.notices,
            "accuracies": {name: rate.as_dict() for name, _, rate in self.tiles},
            **self.conclusion._asdict(),
        }
        write_atomically(folder / "report.json", dump_json(facts))
        write_atomically(page, self.html())
        return page


def notice_groups(notices: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Names of runs -> their notices; a notice that several runs share appears once."""
    runs: dict[str, list[str]] = {}
    for notice in notices:
        runs.setdefault(notice["text"], []).append(notice["run"])
    groups: dict[str, list[str]] = {}
    for text, names in runs.items():
        if len(names) > MOST_NAMES:
            names = [*names[: MOST_NAMES - 2], f"{names[MOST_NAMES - 2]} and {len(names) - MOST_NAMES + 1} more"]
        groups.setdefault(", ".join(names), []).append(text)
    return groups


def is_attack(run: StoredCertification) -> bool:
    """True for a run of `attack`, also before its first record."""
    return run.manifest["command"] == "attack"


def build_report(folders: Sequence[Path | str], options: Options | None = None) -> Report:
    """One certification in depth, or several side by side, and trainings with their curves."""
    chosen, unpaired = options or Options(), dict[str, str]()
    if not folders or isinstance(folders, str | Path):
        raise InputError(f"folders must be a list of at least one run folder, e.g. ['runs/a'], not {folders!r:.60}")
    certified, trained = read_runs(folders)
    traced = trace(certified, trained)
    subtitle, tiles = "", list[tuple[str, str, Rate]]()
    if (chosen.dataset, chosen.data_dir) != (None, None) and len(traced) != 1:
        raise InputError("dataset and data_dir are for the images of one certification; leave them out")
    if len(traced) > 1:
        claims = [one for one in traced if not is_attack(one.run)]
        base = claims[0] if claims else traced[0]
        if chosen.baseline is not None:
            where = chosen.baseline
            named = [one for one in traced if one.run.name == str(where) or one.run.folder.resolve() == where.resolve()]
            if not named or named[0] not in claims:
                names = " or ".join(one.run.name for one in claims) or "of which there is none"
                raise InputError(f"baseline must be the folder or name of a certification, {names}, not {where}")
            base = named[0]
        others = [run for run in certified if run is not base.run]
        unpaired = {run.name: reason for run in others if (reason := why_not_paired(base.run, run)) is not None}
        # Attacking a defence does not make another one: an attack is no rival, its bounds are in the conclusion.
        rivals = [run for run in others if not is_attack(run)]
        comparisons = compare(base.run, *(run for run in rivals if run.name not in unpaired))
        sections = side_by_side(traced, base.run, comparisons)
        reasons = {run.name: unpaired[run.name] for run in rivals if run.name in unpaired}
        conclusion = conclude(about_runs(traced, base, comparisons, reasons), certified)
        attacks = sum(map(is_attack, certified))
        kinds = [(len(certified) - attacks, "certification", "certifications"), (attacks, "attack", "attacks")]
        title = f"{' and '.join(count_words(*kind) for kind in kinds if kind[0])} side by side"
        subtitle = f"With {count_words(len(trained), 'training run', 'training runs')}" if trained else ""
    elif chosen.baseline is not None:
        count = "one" if traced else "none"
        raise InputError(f"baseline needs several certifications to compare, and there is {count}")
    elif traced:
        (one,), (run,) = traced, certified
        sections = one_certification(one, dataset=chosen.dataset, data_dir=chosen.data_dir, images=chosen.images)
        tiles = [(name, meanings(run)[name], rate) for name, rate in run.rates.items()]
        conclusion = conclude(about_run(one), certified)
        title = f"{run.defense if run.manifest.get('model') is None else run.architecture} on {run.dataset}"
        patches = f"one patch of {run.patch_words}" if run.patches == 1 else run.patch_words
        about = f"Certified {run.guarantee} against {patches} anywhere on the image"
        subtitle = f"{about}; {run.defense}, {run.masks_words}; run {run.name}"
    else:
        sections, conclusion = [], conclude(about_trainings(trained))
        title = f"Training: {trained[0].name}" if len(trained) == 1 else f"{len(trained)} training runs"
    sections += trainings(trained)
    found = [(name, f"mixed: {reason}") for name, reason in unpaired.items()]
    for run in certified:
        broken = [str(record.index) for record in run.attacks if record.broken]
        words = count_words(len(broken), "certified image was", "certified images were")
        which = f"image {shortened(', '.join(broken), 60)}; see broken/ in the run's folder"
        found += [(run.name, f"{words} broken by a patch, which a certificate rules out: {which}")] if broken else []
    every: list[StoredCertification | StoredTraining] = [*certified, *trained]
    for stored in every:
        found += [(stored.name, text) for text in (one_class_words(stored), *stored.notices) if text is not None]
    return Report(
        printable(chosen.title or title),
        subtitle,
        [{"run": name, "text": text} for name, text in found],
        tiles,
        [section for section in sections if section.shown],
        [whole for section in sections for table in section.tables if (whole := table.whole or table).rows],
        conclusion,
    )
