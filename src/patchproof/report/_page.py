"""One self-contained HTML page: nothing in it is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from patchproof import __version__
from patchproof.records import Rate
from patchproof.report._figures import Picture
from patchproof.report._gallery import Gallery
from patchproof.report._tables import Table
from patchproof.report._text import percent

GENERATOR = "patchproof report"
"""What the page's head says it was made by; an earlier report is known by it."""

NAMED = 4
"""Of more runs that share a notice, not all are named."""


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
    words: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    gallery: Gallery | None = None
    wide: bool = False

    def __bool__(self) -> bool:
        return bool(self.pictures or self.tables or self.gallery)

    @property
    def beside(self) -> bool:
        """One figure and one table stand side by side where the screen is wide enough."""
        return len(self.pictures) == len(self.tables) == 1


@dataclass(frozen=True)
class Tile:
    """An accuracy in large type."""

    name: str
    meaning: str
    rate: Rate

    @property
    def value(self) -> str:
        return percent(self.rate.rate) if self.rate.n else "–"

    @property
    def interval(self) -> str:
        low, high = self.rate.interval
        return f"{100 * low:.1f}–{percent(high)}"


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    notices: Sequence[Notice]
    tiles: Sequence[Tile]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML; every text is escaped, only the figures' own SVG is not."""
    template = _environment().from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return template.render(page=page, groups=notice_groups(page.notices), generator=GENERATOR, version=__version__)


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = lambda picture: Markup(picture.inline)
    return environment


def notice_groups(notices: Sequence[Notice]) -> dict[str, list[str]]:
    """Whom it concerns, in words -> what is to be said; what is true of several runs is said once."""
    runs: dict[str, list[str]] = {}
    for notice in notices:
        runs.setdefault(notice.text, []).append(notice.run)
    groups: dict[str, list[str]] = {}
    for text, names in runs.items():
        groups.setdefault(_names_words(names), []).append(text)
    return groups


def _names_words(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} more"
