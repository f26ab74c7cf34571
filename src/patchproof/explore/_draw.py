"""Tables, images and rounds as HTML, in which names of files and classes are escaped.

Elements that can be clicked have an attribute `data-pick` that says what they stand for.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from patchproof.explore._explorer import Explorer, Selection
from patchproof.explore._findings import Cell, CopyTable, Rounds, mask_words
from patchproof.geometry import Rect
from patchproof.masking import fill_colour
from patchproof.runs import Record
from patchproof.types import Size

BLUE, VERMILION, MIDDLE = (0, 114, 178), (213, 94, 0), (247, 247, 247)
"""Colours by Okabe and Ito: the label leads, another label leads, neither."""

NUMBERED = 10
"""Most masks for which the table has a number in each cell and at each row and column."""

LARGEST_TABLE = 64
"""Most masks for which a table is drawn; a browser cannot hold 18,000 cells."""

SMALL = 64
"""Images with shorter sides are drawn pixel by pixel."""

SIGNS = {"right": "✓", "wrong": "✕", "close": "≈"}


def escaped(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def message(text: str, *, kind: str = "plain") -> str:
    """A line that screen readers read out when it appears."""
    return f'<p class="pp-message pp-{kind}" role="status">{escaped(text)}</p>' if text else ""


def picture(pixels: UInt8[Tensor, "3 h w"], words: str) -> str:
    sharp = " pp-sharp" if max(pixels.shape[1:]) < SMALL else ""
    return f'<img class="pp-picture{sharp}" src="{data_uri(pixels)}" alt="{escaped(words)}">'


def data_uri(pixels: UInt8[Tensor, "3 h w"]) -> str:
    """The image without loss, as an address that holds all of it."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def colour(margin: float, scale: float) -> tuple[int, int, int]:
    """From vermilion (−scale) over near-white (0) to blue (+scale); NaN is vermilion: no label leads there."""
    share = -1.0 if math.isnan(margin) else max(-1.0, min(1.0, margin / scale if scale else 0.0))
    end = BLUE if share > 0 else VERMILION
    red, green, blue = (round(m + (e - m) * abs(share)) for m, e in zip(MIDDLE, end, strict=True))
    return red, green, blue


def cell_kind(copies: CopyTable, cell: Cell, label: int) -> str:
    return "wrong" if int(copies.labels[cell]) != label else "right" if bool(copies.right[cell]) else "close"


def heat_map(explorer: Explorer, shown: Selection, copies: CopyTable) -> str:
    """The n×n table of margins as colours, and for small n numbers; wrong labels are hatched, close ones dotted."""
    n, label, name = len(copies.labels), shown.finding.label, escaped(explorer.name(shown.finding.label))
    if n > LARGEST_TABLE:
        return message(f"The table of {n}×{n} pairs is too large for a page; choose a pair below.")
    finite = copies.margins[copies.margins.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    digits = 1 if scale >= 1 else 2
    ticks = [f"<b>{i + 1 if n <= NUMBERED or i % 6 == 0 else ''}</b>" for i in range(n)]
    cells = f"<b>↓→</b>{''.join(ticks)}"
    for a in range(n):
        cells += ticks[a]
        for b in range(n):
            margin, kind = float(copies.margins[a, b]), f"pp-cell pp-cell-{cell_kind(copies, (a, b), label)}"
            if (a, b) == shown.cell:
                kind += " pp-selected"
            words = f"{mask_words((a, b))}: {explorer.name(int(copies.labels[a, b]))}, margin {margin:+.3g}"
            ink = "#fff" if margin > 0.93 * scale else "#000"
            style = f"background-color: rgb{colour(margin, scale)}; color: {ink}"
            number = f"<i>{margin:z.{digits}f}</i>" if n <= NUMBERED else ""
            cells += (
                f'<span class="{kind}" data-pick="{a} {b}" title="{escaped(words)}" style="{style}">{number}</span>'
            )
    end = f"{scale:.{digits}f}"
    stops = ", ".join(f"rgb{colour(share * scale, scale)}" for share in (-1, 0, 1))
    return (
        f'<figure class="pp-heat"><div class="pp-grid" style="--n: {n}" role="img" '
        f'aria-label="Margin of {name} under every pair of {n} masks">{cells}</div><figcaption class="pp-legend">'
        f'<span class="pp-scale">−{end}<i class="pp-bar" style="background: linear-gradient(to right, {stops})">'
        f"</i>+{end}</span><span>margin of <b>{name}</b>: its logit minus the largest other one</span>"
        "<span>↓ first mask, → second mask</span>"
        '<span><i class="pp-key pp-cell-wrong"></i> another label wins</span>'
        '<span><i class="pp-key pp-cell-close"></i> too close to count</span></figcaption></figure>'
    )


def strip(explorer: Explorer, shown: Selection, copies: CopyTable) -> str:
    """The one-mask copies with their labels and margins."""
    votes = ""
    for mask in range(copies.labels.shape[1]):
        kind, name = cell_kind(copies, (0, mask), shown.finding.label), explorer.name(int(copies.labels[0, mask]))
        words = f"{mask + 1}: {SIGNS[kind]} {name} {float(copies.margins[0, mask]):+.2g}"
        style = "agrees" if kind == "right" else "differs"
        if mask == shown.cell[1]:
            style += " pp-selected"
        votes += vote(explorer, (mask,), words, style, pick=f"0 {mask}")
    return thumbs(explorer, shown.pixels, f'<div class="pp-votes">{votes}</div>')


def masked_copy(explorer: Explorer, shown: Selection, copies: CopyTable) -> str:
    """The masked copy of the selected cell as the classifier saw it."""
    cell, masks = shown.cell, copies.masks(shown.cell)
    name, about = escaped(explorer.name(int(copies.labels[cell]))), escaped(explorer.name(shown.finding.label))
    which, sign = mask_words(masks), SIGNS[cell_kind(copies, cell, shown.finding.label)]
    return (
        f'<div class="pp-copy">{picture(explorer.masked(shown.pixels, masks), f"the image under {which}")}'
        f"<p>Under {which}: <b>{sign} {name}</b><br>margin of {about}: "
        f"<b>{float(copies.margins[cell]):+.3g}</b></p></div>"
    )


def box(rect: Rect, size: Size) -> str:
    """The CSS for a rectangle of the image."""
    rows = f"top: {100 * rect.top / size[0]:.3f}%; height: {100 * rect.height / size[0]:.3f}%"
    return f"{rows}; left: {100 * rect.left / size[1]:.3f}%; width: {100 * rect.width / size[1]:.3f}%"


def patched_view(shown: Selection, size: Size) -> str:
    """The image with its patches framed; a click on it says where the chosen patch should go."""
    places = " and ".join(f"a patch at row {rect.top}, column {rect.left}" for _, rect in shown.patches)
    frames = "".join(f'<span class="pp-frame" style="{box(rect, size)}"></span>' for _, rect in shown.patches)
    return f'<div class="pp-stage" data-pick="place">{picture(shown.patched, f"the image with {places}")}{frames}</div>'


def cards(explorer: Explorer, records: Sequence[Record], selected: int | None) -> str:
    """Images to pick from, each with a sign and words that say whether it is certified."""
    found = ""
    for record in records:
        name = explorer.name(record.label)
        try:
            image = picture(explorer.pixels(record), name)
        except (ValueError, RuntimeError, OSError):  # the file is gone; picking the image says why
            image = '<span class="pp-picture pp-gone">?</span>'
        proved = {None: "", True: "✓ certified", False: "✕ not certified"}[record.certified]
        margin = "" if record.margin is None else f"<br>margin {record.margin:+.2g}"
        pressed = str(record.index == selected).lower()
        found += (
            f'<button class="pp-card" type="button" data-pick="{record.index}" aria-pressed="{pressed}">{image}'
            f"<span><b>{escaped(name)}</b><br>{proved}{margin}</span></button>"
        )
    return (
        f'<div class="pp-cards">{found}</div>'
        if found
        else message("No image is of this kind; choose another kind, or drop in an image of your own.")
    )


def rounds_view(explorer: Explorer, pixels: UInt8[Tensor, "3 h w"], rounds: Rounds) -> str:
    """The copies under one mask with their labels; for double masking also the second round of the disagreeing ones."""
    if not rounds.first:
        return ""

    def votes(labels: Sequence[int], agreed: int, *hidden: int, decides: int | None = None) -> str:
        found = ""
        for mask, label in enumerate(labels):
            kind = "decides" if mask == decides else "agrees" if label == agreed else "differs"
            sign = {"agrees": "", "differs": "✕ ", "decides": "★ "}[kind]
            found += vote(explorer, (*hidden, mask), f"{mask + 1}: {sign}{explorer.name(label)}", kind)
        return f'<div class="pp-votes">{found}</div>'

    content = f"<h4>Round one: each mask once</h4>{votes(rounds.first, rounds.majority, decides=rounds.confirmed)}"
    if rounds.second is None:
        return thumbs(explorer, pixels, content)
    content += "<h4>Round two: each disagreeing copy under every further mask</h4>"
    if not rounds.second:
        content += "<p>Not needed: the first round is unanimous.</p>"
    for copy, labels in rounds.second.items():
        label, opened = rounds.first[copy], ""
        words = f"{sum(one != label for one in labels)} of {len(labels)} say something else: it does not count"
        if copy == rounds.confirmed:
            words, opened = "all agree: this copy decides", " open"
        summary = escaped(f"copy {copy + 1}, {explorer.name(label)}: {words}")
        second = votes(labels, label, copy)
        content += f'<details class="pp-second"{opened}><summary>{summary}</summary>{second}</details>'
    left = rounds.disagreeing - len(rounds.second)
    if rounds.second and left:
        content += f"<p>{left} more disagreeing copies need not be asked, because the answer is known.</p>"
    return thumbs(explorer, pixels, content)


def vote(explorer: Explorer, hidden: Sequence[int], words: str, kind: str, *, pick: str | None = None) -> str:
    """A small masked copy: the masks, drawn over the image of `thumbs`."""
    rects = dict.fromkeys(rect for mask in hidden for rect in explorer.defense.masks.parts[mask])
    boxes = "".join(f'<i style="{box(rect, explorer.size)}"></i>' for rect in rects)
    data = "" if pick is None else f' data-pick="{pick}"'
    thumb = f'<span class="pp-thumb">{boxes}</span>'
    return f'<div class="pp-vote pp-{kind}"{data}>{thumb}<span>{escaped(words)}</span></div>'


def thumbs(explorer: Explorer, pixels: UInt8[Tensor, "3 h w"], content: str) -> str:
    """Votes on one image, which is in the page only once."""
    (height, width), sharp = explorer.size, " pp-sharp" if max(explorer.size) < SMALL else ""
    fill = fill_colour(explorer.defense.classifier, torch.empty(0, 3, 1, 1)).flatten().mul(255).round().int().tolist()
    style = f"--image: url({data_uri(pixels)}); --fill: rgb{tuple(fill)}; --shape: {width} / {height}"
    return f'<div class="pp-rounds{sharp}" style="{style}">{content}</div>'
