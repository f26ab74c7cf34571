"""A console on which data cannot act: what is printed of names and messages is text, never a control sequence."""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text


class Console(rich.console.Console):
    """Rich's, but a string shows its control characters and its bytes that are no text as `\\x1b` and `\\udcff`.

    File names, class names and what a checkpoint says of itself may come from anybody.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def visible(text: str) -> str:
    """`text` in characters that can be shown on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
