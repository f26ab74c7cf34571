"""Figures that can be read in black and white and with any colour vision; equal data give equal bytes.

The colours are Okabe and Ito's without yellow. Each series has its own marker and line, bars are full or hatched.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.transforms import ScaledTranslation

from patchproof.report._counts import Paired
from patchproof.runs import Rate
from patchproof.types import shortened

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
FILLS = ((COLOURS[0], ""), ("none", "////"))
"""Face colour and hatch of the first and the second group of bars."""

ASIAN = {"Microsoft YaHei", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei"}
FONTS = ["DejaVu Sans", *sorted(ASIAN & set(fontManager.get_font_names()))]
"""The font that comes with matplotlib, then installed ones for letters that it lacks."""

INK, GRID = "#16181d", "#8a8f98"
WIDTH = 4.5
"""Width of a figure in inches; at this width its labels can be read on a phone."""

TITLE_WIDTH = 52
"""Letters of a title that fit into one line."""

STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": 9.5,
    "figure.titleweight": "bold",
    "font.family": FONTS,
    "font.size": 9.5,
    "grid.alpha": 0.35,
    "grid.color": GRID,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.markersize": 5.0,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "patchproof",
    "text.parse_math": False,  # a class may be called $5
}
UNSTAMPED = {"svg": {"Date": None, "Creator": None, "Format": None, "Type": None}, "png": {"Software": None}}


@dataclass(frozen=True)
class Picture:
    """A figure with its file name `key` and the words `alt` for readers who cannot see it; rendered when first used."""

    key: str
    title: str
    alt: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        return self._rendered("svg", transparent=True).decode("utf-8")

    @cached_property
    def png(self) -> bytes:
        assert self.svg  # rendering the SVG settles the layout, which takes as long as drawing and need not be repeated
        self.figure.set_layout_engine("none")
        return self._rendered("png", facecolor="white")

    def _rendered(self, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        with styled(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # no installed font has it
            self.figure.savefig(file, format=kind, metadata=UNSTAMPED[kind], **options)
        return file.getvalue()

    @property
    def inline(self) -> str:
        """The SVG as an element of a page, with unique ids, the page's text colour and no fixed size."""
        svg = self.svg[self.svg.index("<svg") :].replace(INK, "currentColor")
        svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{self.key}-", svg)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)

    @property
    def svg_file(self) -> str:
        """The SVG on a white ground."""
        return self.svg.replace(" <defs>", ' <rect width="100%" height="100%" fill="#ffffff"/>\n <defs>', 1)


def styled() -> AbstractContextManager[None]:
    """Give figures the style of reports inside the block, and restore matplotlib's settings afterwards."""
    return matplotlib.rc_context(STYLE)  # type: ignore[arg-type]


@contextmanager
def drawing(key: str, title: str, alt: str, *, height: float = 3.1) -> Iterator[tuple[Picture, Axes]]:
    """A figure and its axes, to draw on inside the block; a legend is put below if anything has a label."""
    with styled():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        yield Picture(key, title, alt, figure), axes
        lines = textwrap.fill(title.replace(" = ", "\u00a0=\u00a0"), TITLE_WIDTH)  # `n = 400` stays on one line
        figure.suptitle(lines.replace("\u00a0", " "), x=0.02, ha="left")
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            columns = max(1, min(3, 64 // (max(map(len, labels)) + 6)))
            figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def numbers(values: Iterable[int]) -> str:
    """The different values in ascending order, as words for a title."""
    return shortened(", ".join(f"{value:,}" for value in sorted(set(values))), 24)


def percents(found: Sequence[Rate | Paired]) -> tuple[list[float], list[list[float]]]:
    """Rates or differences in percent, and how far their 95% intervals reach below and above."""
    values = [one.rate if isinstance(one, Rate) else one.difference for one in found]
    below = [100 * max(0.0, value - one.interval[0]) for value, one in zip(values, found, strict=True)]
    above = [100 * max(0.0, one.interval[1] - value) for value, one in zip(values, found, strict=True)]
    return [100 * value for value in values], [below, above]


def series_style(number: int) -> dict[str, Any]:
    """Marker, line and colour of a series; the first thirty differ in more than colour."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def percent_axis(axes: Axes, rates: Iterable[Rate]) -> None:
    """Let the axis run to 100% from the ten below the lowest interval, so that differences can be seen."""
    lowest = min((100 * rate.interval[0] for rate in rates), default=0.0)
    start = 10 * max(0, math.floor((lowest - 2) / 10))
    axes.set_ylim(start - (100 - start) / 50, 100 + (100 - start) / 50)


def error_line(
    axes: Axes, x: Sequence[float], rates: Sequence[Rate], *, label: str, number: int, of: int, joined: bool = True
) -> None:
    """Draw rates with their 95% intervals; line `number` of `of` is shifted a little, so that none hides another."""
    aside = ScaledTranslation((number - (of - 1) / 2) * min(5.0, 20 / of) / 72, 0, axes.figure.dpi_scale_trans)
    look = series_style(number) | ({} if joined else {"linestyle": "none"})
    look |= {"capsize": 2.5, "elinewidth": 1, "transform": axes.transData + aside}
    values, reach = percents(rates)
    axes.errorbar(x, values, yerr=reach, label=label, **look)
    # Lines with a transform of their own are not counted when axes choose their limits.
    axes.update_datalim([(at, 100 * bound) for at, rate in zip(x, rates, strict=True) for bound in rate.interval])
    axes.autoscale_view()


def dots(
    axes: Axes,
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[Rate | Paired | None], bool]],
    *,
    step: float = 0.0,
) -> None:
    """Draw one horizontal line per name with the points of every series on it, with 95% intervals.

    A series has a label, a rate or difference per name, and whether its markers are hollow. `step` is the vertical
    distance between two series on a line.
    """
    for number, (label, found, hollow) in enumerate(series):
        aside = step * (number - (len(series) - 1) / 2)
        places = [place + aside for place, one in enumerate(found) if one is not None]
        values, reach = percents([one for one in found if one is not None])
        look: dict[str, Any] = {"color": COLOURS[number], "fmt": MARKERS[number], "capsize": 2, "elinewidth": 1}
        face = "none" if hollow else COLOURS[number]
        axes.errorbar(values, places, xerr=reach, label=label, markerfacecolor=face, **look)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
