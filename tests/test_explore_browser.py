"""The explorer's page in a real browser: clicked, dropped on, dragged about, and given what it must refuse."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from patchproof.cli import run
from patchproof.explore import UPLOAD_LIMIT, Explorer, open_explorer, serve
from patchproof.types import InputError
from small_model import fitted_checkpoint
from test_explore import png

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [  # not imported: a process that runs none of these tests does without the seconds that it takes
    pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: install Debian's `chromium` to open the page"),
    pytest.mark.skipif(not find_spec("playwright"), reason="NO PLAYWRIGHT: pip install playwright"),
    pytest.mark.skipif(not find_spec("gradio"), reason="NO GRADIO: pip install 'patchproof[explore]' to test the page"),
]

PATIENCE = 30_000
PICKED = "#cards .pp-card[aria-pressed=true]"
TOAST = ".toast-message-text"
SHOTS = os.environ.get("PATCHPROOF_SHOTS")
"""Where to leave pictures of the page, if anywhere; docs/images/explore.png is `explorer-1280-light.png`."""


def serving(folder: Path, defense: str) -> Iterator[str]:
    weights, output = str(fitted_checkpoint(folder / "checkpoint-last")), str(folder / "run")
    shared = ["--weights", weights, "--limit", "30", "--device", "cpu", "--output", output]
    assert run(["certify", "--defense", defense, *shared]) == 0
    with serve(open_explorer(folder / "run"), host="127.0.0.1", port=None) as url:
        yield url


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    yield from serving(tmp_path_factory.mktemp("explore"), "patchcleanser")


@pytest.fixture(scope="module")
def alarm_address(tmp_path_factory) -> Iterator[str]:
    yield from serving(tmp_path_factory.mktemp("explore-alarm"), "alarm")


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that is open, and everything it complained about or asked the outside for."""

    def __init__(self, browser, address: str, *, width: int = 1280, dark: bool = False) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        self.page.set_default_timeout(PATIENCE)
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, address))
        self.page.goto(address)
        self.page.wait_for_selector("#rounds .pp-vote")
        self.page.wait_for_selector(PICKED)

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.outside.append(url)

    def text(self, place: str) -> str:
        return self.page.inner_text(place)

    def until(self, place: str, pattern: str) -> str:
        """The text of `place` once it matches."""
        self.page.wait_for_function(
            "([place, pattern]) => new RegExp(pattern, 's').test(document.querySelector(place)?.innerText ?? '')",
            arg=[place, pattern],
        )
        return self.text(place)

    def drop(self, place: str, name: str, content: bytes) -> None:
        """Drop a file onto a drop zone, as a hand with a mouse does."""
        transfer = self.page.evaluate_handle(
            "([name, bytes]) => { const t = new DataTransfer();"
            " t.items.add(new File([new Uint8Array(bytes)], name)); return t; }",
            [name, list(content)],
        )
        target = f"{place} button, {place} [role=button]"
        for event in ("dragenter", "dragover", "drop"):
            self.page.locator(target).first.dispatch_event(event, {"dataTransfer": transfer})


@pytest.fixture(scope="module")
def opened(browser, address) -> Iterator[Visit]:
    visit = Visit(browser, address)
    yield visit
    visit.page.close()


@pytest.fixture
def visit(opened) -> Iterator[Visit]:
    """The page as the test before left it: opening it takes longer than most tests."""
    yield opened
    assert (opened.errors, opened.outside) == ([], [])


def test_a_click_on_the_heat_map_shows_that_copy(visit):
    before = visit.page.get_attribute("#copy img", "src")
    cell = visit.page.locator("#table .pp-cell[data-pick='1 6']")
    title = cell.get_attribute("title")
    said, margin = re.fullmatch(r"masks 2 and 7: (.*), margin (.*)", title).groups()
    cell.click()
    shown = visit.until("#copy", "Under masks 2 and 7")
    assert said in shown
    assert margin in shown
    assert visit.page.get_attribute("#copy img", "src") != before
    assert visit.page.input_value("#first-mask input[type=number]") == "2"
    assert visit.page.input_value("#second-mask input[type=number]") == "7"
    visit.page.press("#second-mask input[type=range]", "ArrowRight")
    visit.until("#copy", "Under masks 2 and 8")


def show_only(visit, kind: str, *, without: str) -> None:
    visit.page.get_by_label(kind, exact=True).check()
    visit.page.wait_for_function(f"!document.querySelector('#cards').innerText.includes('{without}')")


def pick(visit, number: int) -> None:
    """Click a card, unless it is picked already, and wait until its image is the one that is shown."""
    visit.page.wait_for_selector(PICKED)  # the first of a kind, which comes by itself
    card = visit.page.locator("#cards .pp-card").nth(number)
    index = card.get_attribute("data-pick")
    if card.get_attribute("aria-pressed") == "false":
        card.click()
    visit.page.wait_for_selector(f"{PICKED}[data-pick='{index}']")


def test_another_image_of_the_run_can_be_picked_by_what_was_found(visit):
    """The image shown follows the kind that is chosen, and stays where it is of that kind already."""
    for kind, without in (("certified", "✕"), ("not certified", "✓")):
        show_only(visit, kind, without=without)
        visit.until("#verdict", f"The run's record: {kind}, margin")
        visit.page.wait_for_selector(PICKED)
    assert re.search(r"Page, 1 to \d", visit.text("#page-number"))
    pick(visit, 1)
    before = visit.text("#verdict .pp-message")
    visit.page.get_by_label("all", exact=True).check()
    visit.until("#cards", "✓ certified")
    assert visit.text("#verdict .pp-message") == before
    show_only(visit, "not certified", without="✓")
    shown = visit.until("#verdict", "Not certified: ")
    assert "The run's record: not certified, margin" in shown
    assert visit.page.locator("#table .pp-cell-wrong.pp-cell, #table .pp-cell-close.pp-cell").count() > 0
    show_only(visit, "certified", without="✕")
    visit.until("#verdict", "The run's record: certified, margin")  # a click before that is lost
    visit.page.wait_for_selector(PICKED)
    pick(visit, 0)
    visit.until("#verdict", r"Certified: all 45 pairs")
    assert visit.page.locator("#table .pp-cell.pp-cell-wrong").count() == 0


def test_an_image_that_comes_late_leaves_the_kind_chosen_meanwhile(visit, monkeypatch):
    """The cards of the kind that was chosen when the image was picked are not put back."""
    show_only(visit, "not certified", without="✓")
    visit.until("#verdict", "The run's record: not certified, margin")
    go_on, rounds = threading.Event(), Explorer.rounds
    monkeypatch.setattr(Explorer, "rounds", lambda *given: go_on.wait(PATIENCE / 1000) and rounds(*given))
    record = "#verdict .pp-message"
    before = visit.text(record)
    visit.page.locator("#cards .pp-card[aria-pressed=false]").first.click()
    show_only(visit, "certified", without="✕")
    assert visit.text(record) == before
    go_on.set()
    changed = "([place, before]) => document.querySelector(place).innerText !== before"
    visit.page.wait_for_function(changed, arg=[record, before])
    assert "✓ certified" in visit.text("#cards")
    assert "✕" not in visit.text("#cards")


def test_the_patch_moves_and_changes_and_the_rounds_follow(visit):
    page, changed = visit.page, "before => document.querySelector('#stage img').src !== before"
    before = page.get_attribute("#rounds .pp-rounds", "style")
    box = page.locator("#stage .pp-stage").bounding_box()
    page.click("#stage .pp-stage", position={"x": box["width"] * 0.9, "y": box["height"] * 0.2})
    page.wait_for_selector("#stage img[alt='the image with a patch at row 3, column 23']")
    assert page.input_value("#patch-row input[type=number]") == "3"
    assert page.get_attribute("#rounds .pp-rounds", "style") != before
    page.press("#patch-row input[type=range]", "ArrowRight")
    page.wait_for_selector("#stage img[alt='the image with a patch at row 4, column 23']")
    noise = page.get_attribute("#stage img", "src")
    page.get_by_label("optimised against the defence").check()
    page.click("#make")
    page.wait_for_function(changed, arg=noise)
    optimised = page.get_attribute("#stage img", "src")
    page.get_by_label("a picture", exact=True).check()
    page.wait_for_selector("#patch-file")
    visit.drop("#patch-file", "sticker.png", png())
    page.wait_for_function(changed, arg=optimised)
    assert re.search(r"the answer is \w", visit.text("#answer"))
    assert page.locator(TOAST).count() == 0


def test_a_file_is_dropped_in_or_refused_and_the_image_stays(visit, monkeypatch, tmp_path):
    visit.drop("#own", "mine.png", png())
    assert re.search(r"(Certified|Not certified): ", visit.until("#verdict", r"Your image mine\.png"))
    verdict = visit.page.locator("#verdict .pp-message")
    before = verdict.all_inner_texts()

    def evil(*given):
        raise InputError("<b>evil</b> & co")

    visit.page.locator("#own button[aria-label='Clear'], #own button[aria-label*='emove']").first.click()

    for name, content, words in (
        ("notes.txt", b"no image at all", r"cannot use notes\.txt: not an image"),
        ("cut.png", png()[:60], r"cannot use cut\.png"),
        ("evil.png", png(), r"<b>evil</b> & co"),
    ):
        if name == "evil.png":
            monkeypatch.setattr(Explorer, "own", evil)
        visit.page.wait_for_selector("#own button:has-text('Drop File Here')")  # a refused file is taken out again
        visit.drop("#own", name, content)
        visit.until(TOAST, words)
        assert verdict.all_inner_texts() == before
        visit.page.locator("[data-testid=toast-close]").first.click()
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(UPLOAD_LIMIT + 1)
    visit.page.set_input_files("#own input[type=file]", large)
    visit.until("body", r"exceed the maximum allowed size of 20")
    assert "Traceback" not in visit.text("body")


WIDE = """() => [...document.querySelectorAll('.pp-message, .pp-card, .pp-vote, .pp-legend, .pp-copy, .pp-head')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 || e.scrollWidth > e.clientWidth + 1)
  .map(e => e.className)"""
CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 :
    ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    const p = parse(c); if (p.length < 4 || p[3] > .99) return c; } return 'rgb(255, 255, 255)'; };
  const texts = '.pp-message, .pp-step p, .pp-head p, .pp-card span, .pp-vote span, .pp-cell i';
  return [...document.querySelectorAll(texts)].map(e => {
    const a = light(getComputedStyle(e).color), b = light(ground(e));
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); });
}"""


OVER_THE_EDGE = """() => [...document.querySelectorAll('#table .pp-cell')].filter(cell => {
  cell.classList.add('pp-cell-wrong');
  cell.firstChild.textContent = '-0.42';
  return cell.firstChild.offsetWidth > cell.offsetWidth; }).length"""
"""Cells that the widest number, marked as wrong, does not fit into."""


EDGES = """() => [['.pp-cards', '#kind', 'left'], ['.pp-cards', '#kind', 'right'], ['#back', '#page-number', 'top'],
  ['#back', '#page-number', 'bottom']].map(([first, second, side]) => Math.abs(
    document.querySelector(first).getBoundingClientRect()[side] -
    document.querySelector(second).getBoundingClientRect()[side]))"""
"""Pixels by which things that belong together are not in line."""


VIEWS = [(390, True)]
VIEWS += [pytest.param(*view, marks=pytest.mark.slow) for view in ((1280, False), (1280, True), (390, False))]


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_the_page_can_be_read_at_any_width_in_light_and_dark(browser, address, width, dark):
    visit = Visit(browser, address, width=width, dark=dark)
    visit.page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")
    assert visit.page.evaluate(WIDE) == []
    assert max(visit.page.evaluate(EDGES)) <= 2
    assert min(visit.page.evaluate(CONTRAST)) > 4.5
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
    if SHOTS:
        visit.page.locator("#cards .pp-card").nth(5).click()  # not certified: all colours
        visit.until("#table", "margin of Coat")
        visit.page.click("#table .pp-cell[data-pick='3 8']")
        visit.until("#copy", "Under masks 4 and 9")
        name = f"explorer-{width}-{'dark' if dark else 'light'}.png"
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        shot = Image.open(io.BytesIO(visit.page.screenshot(full_page=True)))
        shot.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(Path(SHOTS) / name, optimize=True)
    assert visit.page.evaluate(OVER_THE_EDGE) == 0
    visit.page.close()
    assert visit.errors == []
    assert visit.outside == []


def test_a_defence_of_one_round_shows_its_masks_and_its_alarm(browser, alarm_address):
    """Last, since gradio keeps one place for uploads, that of the page made last."""
    visit = Visit(browser, alarm_address)
    assert visit.page.locator("#table .pp-vote").count() == 9
    card = visit.page.locator("#table .pp-vote").nth(6)
    card.click()
    shown = visit.until("#copy", "Under mask 7:")
    said = re.search(r"7: . (.*) ([+-][\d.e-]+)$", card.inner_text().replace("\n", " "))
    assert said[1] in shown
    assert visit.page.locator("#table .pp-selected").count() == 1
    assert not visit.page.locator("#first-mask").is_visible()
    show_only(visit, "certified", without="✕")
    visit.until("#verdict", "The run's record: certified, margin")  # a click before that is lost
    visit.page.wait_for_selector(PICKED)
    pick(visit, 0)
    visit.until("#verdict", r"Certified: all 9 masks say .*the answer is .* or an alarm")
    show_only(visit, "not certified", without="✓")
    for number in range(6):
        pick(visit, number)
        if "the answer is an alarm" in visit.until("#answer", r"the answer is"):
            break
    assert "With it there is an alarm" in visit.text("#answer")
    visit.page.close()
    assert (visit.errors, visit.outside) == ([], [])
