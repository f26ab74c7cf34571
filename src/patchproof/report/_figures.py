"""Figures that can be read in black and white and with any colour vision; equal data give equal bytes.

The colours are Okabe and Ito's without yellow. Each series has its own marker and line, bars are full or hatched.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
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
ASIAN = {"Microsoft YaHei", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei"}
INK, GRID = "#16181d", "#8a8f98"
WIDTH = 4.5
"""Width of a figure in inches; at this width its labels can be read on a phone."""

LEGEND = 52
"""Letters of a legend that fit into this width."""

MOST_TICKS, LETTERS = 12, 44
"""Most ticks below an axis, and most letters of all of them that fit side by side."""

STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": 9.5,
    "figure.titleweight": "bold",
    "font.family": ["DejaVu Sans", *sorted(ASIAN & set(fontManager.get_font_names()))],  # then those with more letters
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
        yield Picture(key, alt, figure), axes
        lines = textwrap.fill(title.replace(" = ", "\u00a0=\u00a0"), 52)  # `n = 400` stays on one line
        figure.suptitle(lines.replace("\u00a0", " "), x=0.02, ha="left")
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            labels = [textwrap.fill(label, LEGEND) for label in labels]
            columns = max(1, min(3, (LEGEND + 6) // (max(map(len, labels)) + 6)))
            figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def numbers(values: Iterable[int]) -> str:
    """The different values in ascending order, as words for a title."""
    return shortened(", ".join(f"{value:,}" for value in sorted(set(values))), 24)


def series_style(number: int) -> dict[str, Any]:
    """Marker, line and colour of a series; the first thirty differ in more than colour."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


Series = Mapping[str, Sequence[Rate | Paired | None]]
"""Label of a series -> its values at the places along an axis; None where there is none."""


def line_picture(
    key: str, title: str, series: Series, xlabel: str, ylabel: str, *, ticks: Sequence[object], joined: bool = True
) -> Picture:
    """Rates from left to right, one place per tick."""
    alt = f"{title}: {len(series)} {'lines' if joined else 'rows of points'} with 95% intervals."
    with drawing(key, title, alt, height=3.0 + 0.16 * len(series)) as (picture, axes):
        draw_errors(axes, series, joined=joined)
        percent_axis(axes, series)
        step = math.ceil(len(ticks) / MOST_TICKS)
        words = [str(tick) for tick in ticks[::step]]
        slant, anchor = (0.0, "center") if sum(map(len, words)) <= LETTERS else (40.0, "right")
        axes.set_xticks(range(0, len(ticks), step), words, rotation=slant, ha=anchor)
        axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(-0.5, len(ticks) - 0.5))
    return picture


def dot_picture(key: str, title: str, names: Sequence[str], series: Series, xlabel: str) -> Picture:
    """Rates, or differences, one horizontal line per name from the top down."""
    height = 1.5 + sum(0.15 + 0.12 * max(len(series), 1 + name.count("\n")) for name in names)
    with drawing(key, title, f"{title}: {len(names)} rows with 95% intervals.", height=height) as (picture, axes):
        if any(isinstance(one, Paired) for found in series.values() for one in found):
            axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        else:
            axes.set_xlim(-2, 102)
        draw_errors(axes, series, across=True, joined=False)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=xlabel, ylim=(len(names) - 0.4, -0.6))
    return picture


def percent_axis(axes: Axes, series: Series) -> None:
    """Let the axis run to 100% from the ten below the lowest interval, so that differences can be seen."""
    lowest = min(100 * one.interval[0] for found in series.values() for one in found if one is not None)
    start = 10 * max(0, math.floor((lowest - 2) / 10))
    axes.set_ylim(start - (100 - start) / 50, 100 + (100 - start) / 50)


def draw_errors(axes: Axes, series: Series, *, across: bool = False, joined: bool = True) -> None:
    """Draw values in percent with their 95% intervals, each series a little aside, so that none hides another.

    The places 0, 1, … are on the horizontal axis, or if the values run `across` on the vertical one.
    """
    for number, (label, values) in enumerate(series.items()):
        places = [place for place, one in enumerate(values) if one is not None]
        found = [one for one in values if one is not None]
        middle = 100 * np.array([one.rate if isinstance(one, Rate) else one.difference for one in found])
        ends = 100 * np.array([one.interval for one in found]).reshape(-1, 2)
        reach = np.clip([middle - ends[:, 0], ends[:, 1] - middle], 0, None)
        shift = (number - (len(series) - 1) / 2) * min(5.0, 20 / len(series)) / 72
        aside = ScaledTranslation(0 if across else shift, -shift if across else 0, axes.figure.dpi_scale_trans)
        look = series_style(number) | ({} if joined else {"linestyle": "none"})
        look |= {"label": label, "capsize": 2.5, "elinewidth": 1, "transform": axes.transData + aside}
        x, y, bars = (middle, places, {"xerr": reach}) if across else (places, middle, {"yerr": reach})
        axes.errorbar(x, y, **bars, **look)
        # Lines with a transform of their own are not counted when axes choose their limits.
        bounds = np.column_stack([np.repeat(places, 2), ends.ravel()])
        axes.update_datalim(bounds[:, ::-1] if across else bounds)
    axes.autoscale_view()
