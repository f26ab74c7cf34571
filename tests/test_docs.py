"""What the documentation tells people to type exists, where it points there is something, and the site builds."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from patchproof.cli import build_app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
BLOCK = re.compile(r"^ *```(sh|bash|console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def shell_lines(text: str) -> Iterator[str]:
    """The command lines of a page's code blocks; of a transcript, only what was typed."""
    for kind, content in BLOCK.findall(text):
        whole = content.replace("\\\n> ", "").replace("\\\n", "")
        for line in re.sub(r"\$\w+", "3", whole).splitlines():
            if kind != "console":
                yield line
            elif line.startswith("$ "):
                yield line[2:]


def commands(text: str) -> Iterator[list[str]]:
    """What follows `patchproof` in each simple command, without redirections."""
    for line in shell_lines(text):
        words: list[str] = []
        for word in [*split(line), ";"]:
            if word and set(word) <= set(";|&<>()"):
                if "patchproof" in words:
                    yield words[words.index("patchproof") + 1 :]
                words = []
            else:
                words.append(word)


def split(line: str) -> list[str]:
    lexer = shlex.shlex(re.sub(r"\d>&\d", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def anchors(text: str) -> set[str]:
    """The places a `#` can point to, named as code hosts and myst do."""
    titles = HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, place = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (place and place not in anchors(file.read_text("utf-8"))):
            broken.append(target)
    return broken


def parses(tokens: list[str]) -> str | None:
    """Why the program would refuse these words before it begins; None if it would not."""
    try:
        build_app().parse_args(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_the_program_understands(page):
    wrong = {" ".join(tokens): parses(tokens) for tokens in commands(page.read_text("utf-8"))}
    assert {command: why for command, why in wrong.items() if why} == {}


def test_the_commands_are_found_and_wrong_ones_refused():
    page = "```sh\nx=1 torchrun -m patchproof certify --masks 3 2>&1 > log # why\n```\n"
    page += "```console\n$ patchproof ls\npatchproof certify\n$ for k in 1 2; do patchproof certify --masks $k; done\n"
    page += "$ patchproof certify \\\n> --mask 3\n```\n"
    found = list(commands(page))
    assert found == [["certify", "--masks", "3"], ["ls"], ["certify", "--masks", "3"], ["certify", "--mask", "3"]]
    assert parses(found[0]) is None
    assert "--mask" in str(parses(found[3]))
    assert parses(["certifi"])
    assert parses(["certify", "--precision", "fp8"])


def test_the_pages_hold_commands_of_every_verb():
    verbs = {tokens[0] for page in PAGES for tokens in commands(page.read_text("utf-8")) if tokens}
    assert verbs >= {"train", "certify", "predict", "report", "bench", "doctor"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# A title, with words\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-title-with-words) [b](there.md#no) [c](gone.md) [d](https://x.y/z) `[e](not.md)`")
    assert broken_links(page) == ["there.md#no", "gone.md"]


def test_pictures_are_small():
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert pictures
    assert [p.name for p in pictures if p.stat().st_size > 150_000] == []


def test_pages_are_refreshed_with_what_their_commands_print(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "scripts" / "docs_pictures.py")
    pictures = sys.modules["docs_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    page = "# A\n\n```python\n# two.py\nprint(1 + 1)\n```\n\n"
    page += "```console\n$ python two.py\nan old answer\n$ echo a \\\n> b\n```\n"
    fresh = pictures.refreshed(page, pictures.Place(tmp_path))
    assert fresh == page.replace("an old answer\n", "2\n").replace("> b\n", "> b\na b\n")
    assert pictures.refreshed(fresh, pictures.Place(tmp_path)) == fresh
    assert all((ROOT / "docs" / name).is_file() for name in pictures.PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("THE SITE IS NOT TESTED: sphinx and furo are missing; pip install -e '.[docs]'")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", target / "trees"]
    done = subprocess.run([*command, ROOT / "docs", target / "html"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / "html"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_knows_every_flag(site):
    reference = (site / "reference" / "cli.html").read_text("utf-8")
    for verb in ("train", "certify", "predict", "bench", "report", "demo"):
        for argument in build_app()[verb].assemble_argument_collection():
            if argument.name.startswith("--"):
                assert f"{argument.name}</span>" in reference, (verb, argument.name)


@pytest.mark.slow
def test_the_site_describes_the_public_names_with_their_shapes(site):
    import patchproof

    page = (site / "reference" / "api" / "patchproof.html").read_text("utf-8")
    assert [name for name in patchproof.__all__ if f'id="patchproof.{name}"' not in page] == []
    text = re.sub(r"<[^>]+>", "", page)
    assert re.search(r"Float\[Tensor, .{1,10}b c h w.{1,10}\]", text)


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*\"")
    fetched = {page.name: loads.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert {name: found for name, found in fetched.items() if found} == {}
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?://[^)]*\)|@import[^;]*https?:", styles) == []
