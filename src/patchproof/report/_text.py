"""Words and numbers as every table, figure and page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from patchproof.models import wordnet_words
from patchproof.records import Rate
from patchproof.types import Size

LONGEST = 200


def printable(text: str) -> str:
    """`text` on one line, in characters that can be written and shown; others become \\x1b or \\udcff.

    Names of files, classes and folders may hold line breaks, control characters and bytes that are no text.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return shortened(shown, LONGEST)


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def rate_words(rate: Rate) -> str:
    """`62.3% (57.3–67.0%)`; no percentage of nothing."""
    if not rate.n:
        return "no images"
    low, high = rate.interval
    return f"{percent(rate.rate)} ({100 * low:.1f}–{percent(high)})"


def count_words(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def size_words(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def duration(seconds: float) -> str:
    """In the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def class_words(names: Mapping[int, str]) -> dict[int, str]:
    """Class names in words: WordNet ids, as ImageNet's folders have them, by what they stand for."""
    words = {label: wordnet_words(name) or name for label, name in names.items()}
    shared = {word for word, count in Counter(words.values()).items() if count > 1}
    return {k: printable(f"{word} ({names[k]})" if word in shared else word) for k, word in words.items()}
