"""Tables, images and rounds as HTML and SVG; nothing in it that a file's or a class's name could break."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from patchproof.explore._explorer import Choice, Explorer
from patchproof.explore._rounds import Rounds, SecondRound
from patchproof.explore._table import PairTable
from patchproof.geometry import MaskSet, Rect

BLUE, VERMILION, MIDDLE = (0, 114, 178), (213, 94, 0), (247, 247, 247)
"""Okabe and Ito's: `label` leads, another label leads, neither."""

NUMBERED = 10
"""Tables up to so many masks have the margin written into each cell."""

SMALL = 64
"""Images below this side are drawn pixel by pixel."""


def escaped(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def data_uri(pixels: UInt8[Tensor, "3 h w"]) -> str:
    """The image inside the page itself, without loss."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy())).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def message(text: str, *, kind: str = "error") -> str:
    """A line that screen readers read out when it comes."""
    sign = {"error": "✕", "note": "!", "plain": ""}[kind]
    return f'<p class="pp-message pp-{kind}" role="status"><b>{sign}</b> {escaped(text)}</p>' if text else ""


def colour(margin: float, scale: float) -> tuple[int, int, int]:
    """From vermilion (−scale) over near-white (0) to blue (+scale); NaN is vermilion: no label leads there."""
    share = -1.0 if math.isnan(margin) else max(-1.0, min(1.0, margin / scale if scale else 0.0))
    end = BLUE if share > 0 else VERMILION
    red, green, blue = (round(m + (e - m) * abs(share)) for m, e in zip(MIDDLE, end, strict=True))
    return red, green, blue


def heat_map(table: PairTable, names: Sequence[str], selected: tuple[int, int] | None = None) -> str:
    """The n×n table: colour, and for small n a number, is the margin; wrong labels are hatched, close ones dotted."""
    n, side = len(table), 44 if len(table) <= NUMBERED else 14
    finite = table.margins[table.margins.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    left, top = 46, 40
    cells = "".join(_cell(table, names, a, b, scale, side) for a in range(n) for b in range(n))
    every = 1 if side > 30 else 6
    ticks = "".join(_tick(i, side, vertical=v) for i in range(n) if i % every == 0 or i == n - 1 for v in (True, False))
    outline = ""
    if selected is not None:
        a, b = selected
        outline = f'<rect class="pp-selected" x="{b * side}" y="{a * side}" width="{side}" height="{side}"/>'
    width, height = left + n * side + 6, top + n * side + 6
    words = f"Margin of {names[table.label]} under every pair of {n} masks"
    return (
        f'<figure class="pp-heat"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escaped(words)}">'
        f"{_HATCH}"
        f'<text class="pp-axis" x="{left + n * side / 2}" y="12" text-anchor="middle">second mask</text>'
        f'<text class="pp-axis" transform="translate(12 {top + n * side / 2}) rotate(-90)" '
        'text-anchor="middle">first mask</text>'
        f'<g transform="translate({left} {top})">{cells}{ticks}{outline}</g></svg>'
        f"{_legend(table, names, scale)}</figure>"
    )


_HATCH = (
    '<defs><pattern id="pp-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#000" stroke-width="1.6" stroke-opacity="0.75"/></pattern></defs>'
)


def _cell(table: PairTable, names: Sequence[str], a: int, b: int, scale: float, side: int) -> str:
    margin, label = float(table.margins[a, b]), int(table.labels[a, b])
    wrong, right = label != table.label, bool(table.right[a, b])
    shade = colour(margin, scale)
    x, y = b * side, a * side
    said = f"masks {a + 1} and {b + 1}: {names[label]}, margin {margin:+.3g}"
    parts = [f'<rect width="{side}" height="{side}" fill="rgb{shade}"/>']
    if wrong:
        parts.append(f'<rect width="{side}" height="{side}" fill="url(#pp-hatch)"/>')
    elif not right:
        parts.append(f'<circle cx="{side / 2}" cy="{side / 5}" r="{side / 12}" fill="#000"/>')
    if side > 30:
        parts.append(_number(margin, shade, side, wrong=wrong))
    kind = "wrong" if wrong else "right" if right else "close"
    return (
        f'<g class="pp-cell" data-a="{a}" data-b="{b}" data-kind="{kind}" transform="translate({x} {y})">'
        f"<title>{escaped(said)}</title>{''.join(parts)}</g>"
    )


def _number(margin: float, shade: tuple[int, int, int], side: int, *, wrong: bool) -> str:
    dark = 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] < 140
    ink = "#fff" if dark and not wrong else "#000"
    plate = f'<rect class="pp-plate" x="5" y="{side / 2 - 9}" width="{side - 10}" height="18" rx="3"/>' if wrong else ""
    return f'{plate}<text x="{side / 2}" y="{side / 2 + 4.5}" fill="{ink}" text-anchor="middle">{margin:.1f}</text>'


def _tick(i: int, side: int, *, vertical: bool) -> str:
    middle = i * side + side / 2
    x, y, anchor = (-6.0, middle + 4, "end") if vertical else (middle, -7.0, "middle")
    return f'<text class="pp-axis" x="{x}" y="{y}" text-anchor="{anchor}">{i + 1}</text>'


def _legend(table: PairTable, names: Sequence[str], scale: float) -> str:
    name = escaped(names[table.label])
    stops = ", ".join(f"rgb{colour(share * scale, scale)}" for share in (-1, 0, 1))
    return (
        '<figcaption class="pp-legend"><span class="pp-scale">'
        f'<span>−{scale:.1f}</span><span class="pp-bar" style="background: linear-gradient(to right, {stops})"></span>'
        f"<span>+{scale:.1f}</span></span>"
        f"<span>margin of <b>{name}</b>: its logit minus the largest other one</span>"
        '<span><i class="pp-key pp-key-wrong"></i> another label wins</span>'
        '<span><i class="pp-key pp-key-close"></i> too close to count</span></figcaption>'
    )


def masked_copy(explorer: Explorer, pixels: UInt8[Tensor, "3 h w"], table: PairTable, a: int, b: int) -> str:
    """One cell of the table as the classifier saw it."""
    label, margin = int(table.labels[a, b]), float(table.margins[a, b])
    name, about = escaped(explorer.names[label]), escaped(explorer.names[table.label])
    sign = "✓" if bool(table.right[a, b]) else "✕" if label != table.label else "≈"
    which = f"mask {a + 1}" if a == b else f"masks {a + 1} and {b + 1}"
    return (
        f'<div class="pp-copy">{picture(explorer.masked(pixels, a, b), f"the image under {which}")}'
        f'<p>Under {which}: <b class="pp-answer">{sign} {name}</b><br>margin of {about}: <b>{margin:+.3g}</b></p></div>'
    )


def picture(pixels: UInt8[Tensor, "3 h w"], words: str) -> str:
    sharp = " pp-sharp" if max(pixels.shape[1:]) < SMALL else ""
    return f'<img class="pp-picture{sharp}" src="{data_uri(pixels)}" alt="{escaped(words)}">'


def patched_view(pixels: UInt8[Tensor, "3 h w"], rect: Rect) -> str:
    """The image with its patch framed; a click anywhere says where the patch should go."""
    height, width = int(pixels.shape[1]), int(pixels.shape[2])
    place = "; ".join(
        f"{side}: {100 * value:.3f}%"
        for side, value in (
            ("top", rect.top / height),
            ("left", rect.left / width),
            ("height", rect.height / height),
            ("width", rect.width / width),
        )
    )
    words = f"the image with a patch at row {rect.top}, column {rect.left}"
    return (
        f'<div class="pp-stage" data-height="{height}" data-width="{width}">{picture(pixels, words)}'
        f'<span class="pp-frame" style="{place}"></span></div>'
    )


def cards(explorer: Explorer, choices: Sequence[Choice], selected: int | None) -> str:
    """A page of images to pick from; each says by sign and word whether it is certified."""
    if not choices:
        return message("No image is of this kind.", kind="plain")
    return f'<div class="pp-cards">{"".join(_card(explorer, c, c.index == selected) for c in choices)}</div>'


def _card(explorer: Explorer, choice: Choice, selected: bool) -> str:
    name, record = escaped(explorer.names[choice.label]), choice.record
    try:
        shown = picture(explorer.pixels(choice), explorer.names[choice.label])
    except (ValueError, RuntimeError, OSError):  # a file that is gone; picking it says why
        shown = '<span class="pp-picture pp-gone">?</span>'
    found = "" if record is None else ("✓ certified" if record.certified else "✕ not certified")
    margin = "" if record is None or record.margin is None else f"<br>margin {record.margin:+.2g}"
    pressed = "true" if selected else "false"
    return (
        f'<button class="pp-card" type="button" data-index="{choice.index}" aria-pressed="{pressed}">{shown}'
        f"<span><b>{name}</b><br>{found}{margin}</span></button>"
    )


def rounds_view(explorer: Explorer, pixels: UInt8[Tensor, "3 h w"], rounds: Rounds) -> str:
    """Round one as the masked copies with their labels, round two as what each doubtful copy says next."""
    masks, names = explorer.defense.masks, explorer.names
    copies = "".join(
        _vote(masks, (copy,), names[label], agrees=label == rounds.majority, decides=_decides(rounds, copy))
        for copy, label in enumerate(rounds.first)
    )
    sharp = " pp-sharp" if max(explorer.size) < SMALL else ""
    height, width = explorer.size
    style = f"--image: url({data_uri(pixels)}); --fill: rgb{explorer.fill}; --shape: {width} / {height}"
    second = "".join(_second(masks, r, names) for r in rounds.second)
    skipped = len(rounds.disagreeing) - len(rounds.second)
    left = f"<p>{skipped} more disagreeing copies need not be asked: the answer is known.</p>" if skipped else ""
    none = "<p>Not needed: the first round is unanimous.</p>"
    return (
        f'<div class="pp-rounds{sharp}" style="{style}"><h4>Round one: each mask once</h4>'
        f'<div class="pp-votes">{copies}</div>'
        f"<h4>Round two: each disagreeing copy under every further mask</h4>{second or none}{left}</div>"
    )


def _decides(rounds: Rounds, copy: int) -> bool:
    return any(r.copy == copy and r.confirmed for r in rounds.second)


def _vote(masks: MaskSet, hidden: Sequence[int], name: str, *, agrees: bool, decides: bool = False) -> str:
    kind = "decides" if decides else "agrees" if agrees else "differs"
    sign = {"agrees": "", "differs": "✕ ", "decides": "★ "}[kind]
    height, width = masks.image_size
    boxes = "".join(
        f'<i style="top: {100 * r.top / height:.3f}%; left: {100 * r.left / width:.3f}%; '
        f'height: {100 * r.height / height:.3f}%; width: {100 * r.width / width:.3f}%"></i>'
        for r in (masks.rects[m] for m in hidden)
    )
    return (
        f'<div class="pp-vote pp-{kind}"><span class="pp-thumb">{boxes}</span>'
        f"<span>{hidden[-1] + 1}: {sign}{escaped(name)}</span></div>"
    )


def _second(masks: MaskSet, asked: SecondRound, names: Sequence[str]) -> str:
    votes = "".join(
        _vote(masks, (asked.copy, mask), names[label], agrees=label == asked.label)
        for mask, label in enumerate(asked.labels)
    )
    name = escaped(names[asked.label])
    doubt = f"{asked.against} of {len(asked.labels)} say something else: not believed"
    found = f"all say {name}: this copy decides" if asked.confirmed else doubt
    opened = " open" if asked.confirmed else ""
    return (
        f'<details class="pp-second"{opened}><summary>copy {asked.copy + 1}, {name}: {found}</summary>'
        f'<div class="pp-votes">{votes}</div></details>'
    )
