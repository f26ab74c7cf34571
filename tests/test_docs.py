"""What the documentation tells people to type exists, where it points there is something, and the site builds."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

import patchproof
from patchproof.cli import _layers, build_app
from patchproof.cli._settings import SETTINGS
from patchproof.types import PatchproofError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
BLOCK = re.compile(r"^ *```(sh|bash|console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """What follows `patchproof` in each simple command of the code blocks, without redirections; of a transcript, only
    what was typed."""
    for kind, content in BLOCK.findall(text):
        whole = re.sub(r"\$\w+|…", "3", content.replace("\\\n> ", "").replace("\\\n", ""))
        for line in whole.splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
            lexer = shlex.shlex(re.sub(r"\d>&\d|^\$ ", "", line), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set(";|&<>()"):
                    if "patchproof" in words:
                        yield words[words.index("patchproof") + 1 :]
                    words = []
                else:
                    words.append(word)


@cache
def app_with(verb: str, kind: type | None) -> App:
    return build_app(SETTINGS if kind is None else {**SETTINGS, verb: kind})


def parses(tokens: list[str]) -> str | None:
    """Why the program would refuse these words before it begins; None if it would not."""
    try:
        kind, _ = _layers([token for token in tokens if not token.startswith("--config")])
        app_with(tokens[0], kind).parse_args(tokens, exit_on_error=False, print_error=False)
    except (CycloptsError, PatchproofError) as error:
        return str(error)
    named = {"--weights", "--model", "--recipe", "--config", "--help"} & {token.partition("=")[0] for token in tokens}
    return "no weights" if tokens[0] in ("certify", "attack", "predict", "train") and not named else None


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere; places are named as code hosts and myst do."""
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        path, _, place = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", target) or (file.exists() and not place):
            continue
        text = re.sub(r"^```.*?^```$", "", file.read_text("utf-8"), flags=re.M | re.S) if file.exists() else ""
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}
        broken += [] if place in anchors else [target]
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_the_program_understands_and_links_lead_somewhere(page):
    wrong = {" ".join(tokens): parses(tokens) for tokens in commands(page.read_text("utf-8"))}
    assert {command: why for command, why in wrong.items() if why} == {}
    assert broken_links(page) == []


def test_the_commands_are_found_and_wrong_ones_refused(tmp_path):
    page = "```sh\nx=1 torchrun -m patchproof bench --masks 3 2>&1 > log # why\n```\n"
    page += "```console\n$ patchproof ls\npatchproof certify\n$ for k in 1 2; do patchproof bench --masks $k; done\n"
    page += "$ patchproof bench \\\n> --mask 3\n```\n"
    found = list(commands(page))
    assert found == [["bench", "--masks", "3"], ["ls"], ["bench", "--masks", "3"], ["bench", "--mask", "3"]]
    assert parses(found[0]) is None
    assert "--mask" in str(parses(found[3]))
    wrong = "certifi", "certify --weights w --precision fp8", "certify --weights w --defense nope", "certify --masks 3"
    for words in (*wrong, "certify --weights w --defense alarm --exhaustive"):
        assert parses(words.split())
    assert parses(["certify", "--weights", "w", "--defense", "alarm", "--masks", "4"]) is None
    verbs = {tokens[0] for page in PAGES for tokens in commands(page.read_text("utf-8")) if tokens}
    assert verbs >= {"train", "certify", "attack", "predict", "report", "bench", "doctor"}
    (tmp_path / "there.md").write_text("# A title, with words\n")
    links = tmp_path / "page.md"
    links.write_text("[a](there.md#a-title-with-words) [b](there.md#no) [c](gone.md) [d](https://x.y/z) `[e](not.md)`")
    assert broken_links(links) == ["there.md#no", "gone.md"]


def test_pages_are_refreshed_with_what_their_commands_print_and_pictures_are_small(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "scripts" / "docs_pictures.py")
    pictures = sys.modules["docs_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    page = "# A\n\n```python\n# two.py\nprint(1 + 1)\n```\n\n"
    page += "```console\n$ python two.py\nan old answer\n$ echo a \\\n> b\n```\n"
    fresh = pictures.refreshed(page, pictures.Place(tmp_path))
    assert fresh == page.replace("an old answer\n", "2\n").replace("> b\n", "> b\na b\n")
    assert pictures.refreshed(fresh, pictures.Place(tmp_path)) == fresh
    assert all((ROOT / "docs" / name).is_file() for name in pictures.PAGES)
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").glob("*.png")}
    assert sizes
    assert max(sizes.values()) <= pictures.MOST_BYTES


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
def test_the_site_builds_without_a_warning_and_knows_every_flag_and_public_name(site):
    reference, app = (site / "reference" / "cli.html").read_text("utf-8"), build_app()
    for verb in SETTINGS:
        for argument in app[verb].assemble_argument_collection(default_parameter=app.default_parameter):
            if argument.name.startswith("--"):
                assert f"{argument.name}</span>" in reference, (verb, argument.name)
    page = (site / "reference" / "api" / "patchproof.html").read_text("utf-8")
    public = set(patchproof.__all__) - {"jaxtyping"}  # imported into every module by the checks of these tests
    assert {name for name in public if f'id="patchproof.{name}"' not in page} == set()
    assert re.search(r"Float\[Tensor, .{1,10}b c h w.{1,10}\]", re.sub(r"<[^>]+>", "", page))


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(https?:)?//[^\"]*\"")
    fetched = {page.name: loads.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert {name: found for name, found in fetched.items() if found} == {}
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?://[^)]*\)|@import[^;]*https?:", styles) == []


def test_commands_on_the_home_page_fit_into_its_width():
    blocks = BLOCK.findall((ROOT / "docs" / "index.md").read_text("utf-8"))
    lines = [line for _, block in blocks for line in block.splitlines()]
    assert lines
    assert max(map(len, lines)) <= 75
