"""How pages and signatures look on the site: the decisions' place in the sidebar, each name once, no `<factory>`."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx

import patchproof

TOCTREE = "\n\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def list_decisions(app: Sphinx, name: str, content: list[str]) -> None:
    """The index of decisions is a plain table; its pages join the sidebar through this."""
    if name == "decisions/README":
        content[0] += TOCTREE


def choose_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Whether to leave a member out; None for autodoc's own choice.

    A name that `patchproof` itself has is described there, not again with its module. A public method is shown also
    where its signature says everything, and it has no docstring; the fields of a NamedTuple are in its signature.
    """
    if type(obj).__name__ == "_tuplegetter":
        return True
    if what == "module":
        elsewhere = app.env.docname != "reference/api/patchproof"
        return True if elsewhere and name in patchproof.__all__ else None
    return False if inspect.isfunction(obj) and not name.startswith("_") and _ours(obj) else None


def _ours(obj: Any) -> bool:
    return str(obj.__module__).startswith("patchproof")


def tidy_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A default that is made afresh is `...`, types go by their last name, and a protocol is not called."""
    if signature is None:
        return None
    if getattr(obj, "_is_protocol", False):
        return "()", returns
    return re.sub(r"~(?:\w+\.)+", "", signature.replace("<factory>", "...")), returns


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", list_decisions)
    app.connect("autodoc-skip-member", choose_member)
    app.connect("autodoc-process-signature", tidy_signature)
    return {"parallel_read_safe": True}
