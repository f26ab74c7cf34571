"""One self-contained HTML page: nothing in it is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from patchproof.report._figures import Picture
from patchproof.report._gallery import Gallery
from patchproof.report._tables import Table, interval_words, percent
from patchproof.runs._record import Rate
from patchproof.version import __version__

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
class Page:
    title: str
    subtitle: str
    notices: Sequence[Notice]
    tiles: Sequence[tuple[str, str, Rate]]
    """Accuracies in large type: name, meaning, rate."""
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML; every text is escaped, only the figures' own SVG is not."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = lambda picture: Markup(picture.inline)
    environment.filters |= {"percent": percent, "interval": interval_words}
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return template.render(page=page, groups=notice_groups(page.notices), generator=GENERATOR, version=__version__)


def notice_groups(notices: Sequence[Notice]) -> dict[str, list[str]]:
    """The runs concerned, in words -> what is to be said; what is true of several runs is said once."""
    runs: dict[str, list[str]] = {}
    for notice in notices:
        runs.setdefault(notice.text, []).append(notice.run)
    groups: dict[str, list[str]] = {}
    for text, names in runs.items():
        more = f" and {len(names) - NAMED + 1} more" if len(names) > NAMED else ""
        groups.setdefault(", ".join(names[: NAMED - 1] if more else names) + more, []).append(text)
    return groups
