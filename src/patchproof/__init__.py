"""Make image classifiers provably resistant to adversarial patches, and measure the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchproof.version import __version__ as __version__

if TYPE_CHECKING:
    from patchproof._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A public name, with all that it needs imported now."""
    from importlib import import_module

    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("patchproof._public"), name)
    except AttributeError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def __dir__() -> list[str]:
    from patchproof import _public

    return sorted({*globals(), *_public.__all__})
