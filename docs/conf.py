"""The documentation site: `make docs`. Nothing is fetched, neither to build the pages nor to read them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

from patchproof import __version__  # noqa: E402

project = "patchproof"
author = "The patchproof authors"
copyright = "The patchproof authors, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "command_line", "pages"]
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

smartquotes = False  # `--resume` is two hyphens
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_display_short_literal_types = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r"\$ |> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "patchproof"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#62b5e5", "color-brand-content": "#62b5e5"},
}


def absolute_values(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """|x| in a docstring is an absolute value, not a substitution of reStructuredText."""
    lines[:] = [re.sub(r"\|(\w+)\|", r"\|\1\|", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", absolute_values)
