"""The page itself, in gradio: what is on it, and what each control does."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from patchproof.explore import _draw as draw
from patchproof.explore._explorer import NOISE, PATCH_KINDS, PICTURE, RECORD_KINDS, UPLOAD_LIMIT, Explorer, Selection
from patchproof.explore._findings import explain, meaning, verdict
from patchproof.geometry import size_words
from patchproof.machine import require_address
from patchproof.types import CheckError, InputError, PatchproofError

PAGE = 12
"""Images on one page of the list."""

PICK = """element.addEventListener('click', event => {
  const picked = event.target.closest('[data-pick]');
  if (!picked) return;
  const box = picked.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
  trigger('click', {pick: picked.dataset.pick, x, y});
});"""

CLASSIFIER = {"concurrency_id": "classifier", "concurrency_limit": 1}
CARDS = {"concurrency_id": "cards", "concurrency_limit": 1}
"""Handlers with the same id run one after the other."""

Changes = dict[Any, Any]
"""Component -> new value; the other components stay as they are."""


def require_gradio() -> Any:
    """Import gradio, or say how to install it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise InputError("the explorer needs gradio; install it with: pip install 'patchproof[explore]'") from error
    return gradio


class ExplorerPage:
    """The controls, section by section, and what each of them does.

    A handler gets the event and the values of its inputs, and returns what changes. gradio's types are not annotated,
    because it is imported only when a page is made.
    """

    def __init__(self, explorer: Explorer) -> None:
        self.gr = gr = require_gradio()
        self.explorer = explorer
        notices = "".join(draw.message(text, kind="note") for text in explorer.notices)
        with gr.Blocks(title="patchproof explore", analytics_enabled=False) as self.blocks:
            self.shown = gr.State(None)
            gr.HTML(f'<div class="pp-head"><h1>patchproof</h1><p>{draw.escaped(explorer.title)}</p></div>{notices}')
            for left, right in ((self.image_section, self.table_section), (self.patch_section, self.answer_section)):
                with gr.Row():
                    with gr.Column(scale=2, min_width=300):
                        left()
                    with gr.Column(scale=3, min_width=300):
                        right()
            self.connect()

    def step(self, title: str, words: str) -> None:
        self.gr.HTML(f'<div class="pp-step"><h2>{title}</h2><p>{draw.escaped(words)}</p></div>')

    def image_section(self) -> None:
        gr, offered = self.gr, self.explorer.source is not None
        recorded = any(record.certified is not None for record in self.explorer.records)
        self.step("1 · An image", "Pick one, or drop in your own.")
        self.kind = gr.Radio(list(RECORD_KINDS), value="all", label="Show", visible=recorded, elem_id="kind")
        self.cards = gr.HTML(js_on_load=PICK, elem_id="cards", visible=offered)
        with gr.Row(visible=offered, elem_id="pages"):
            self.back = gr.Button("‹", size="sm", min_width=40, elem_id="back")
            self.number = gr.Number(1, label="Page", precision=0, minimum=1, min_width=90, elem_id="page-number")
            self.next = gr.Button("›", size="sm", min_width=40, elem_id="next")
        limit = UPLOAD_LIMIT // 1024**2
        self.own = gr.File(label=f"Your own image (at most {limit} MB)", elem_id="own", height=150)

    def table_section(self) -> None:
        gr, masks, pairs = self.gr, self.explorer.masks, self.explorer.in_pairs
        if pairs:
            self.step("2 · Under two masks", "One cell per pair of masks. Click a cell to see that copy of the image.")
        elif masks is not None:
            self.step("2 · Under one mask", "The label and its margin under each mask. Click one to see that copy.")
        else:
            self.step("2 · What is proved", "The certificate of the clean image.")
        masked, count = masks is not None, len(masks or ())
        self.verdict = gr.HTML(elem_id="verdict")
        self.table = gr.HTML(js_on_load=PICK, elem_id="table", visible=masked)
        with gr.Row():
            self.first = self.slider("First mask", "first-mask", 1, count, visible=pairs and count > 1)
            label = "Second mask" if pairs else "Mask"
            self.second = self.slider(label, "second-mask", 1, count, visible=count > 1)
        self.copy = gr.HTML(elem_id="copy", visible=masked)

    def slider(self, label: str, elem_id: str, first: int, last: int, *, visible: bool = True) -> Any:
        last = max(first + 1, last)
        return self.gr.Slider(first, last, first, step=1, label=label, visible=visible, min_width=120, elem_id=elem_id)

    def patch_section(self) -> None:
        gr, sizes = self.gr, self.explorer.defense.threat.patch_sizes
        two = self.explorer.defense.threat.patches == 2
        title, which = ("two patches", "chosen ") if two else ("a patch", "")
        self.step(f"3 · Under {title}", f"Click the image to move the {which}{size_words(*sizes)} patch there.")
        self.stage = gr.HTML(js_on_load=PICK, elem_id="stage")
        both = [("first", 0), ("second", 1)]
        self.which = gr.Radio(both, value=0, label="Which patch", visible=two, elem_id="which-patch")
        rows, columns = self.explorer.size
        with gr.Row():
            self.top = self.slider("Patch row", "patch-row", 0, rows - min(height for height, _ in sizes))
            self.left = self.slider("Patch column", "patch-column", 0, columns - min(width for _, width in sizes))
        names = [(f"{size_words(size)} pixels", i) for i, size in enumerate(sizes)]
        self.size = gr.Radio(names, value=0, label="Patch size", visible=len(sizes) > 1, elem_id="patch-size")
        kinds = list(PATCH_KINDS if self.explorer.evaluator else PATCH_KINDS[:2])  # optimising needs a classifier
        self.patch = gr.Radio(kinds, value=NOISE, label="What is on it", elem_id="patch-kind")
        self.file = gr.File(label="Picture for the patch", visible=False, height=150, elem_id="patch-file")
        self.steps = gr.Slider(5, 200, 40, step=5, label="Steps of the optimisation", visible=False, elem_id="steps")
        self.seed = gr.Number(0, label="Seed of the randomness", precision=0, minimum=0, elem_id="seed")
        self.make = gr.Button("Make the patch", variant="primary", elem_id="make")

    def answer_section(self) -> None:
        who = "Double masking" if self.explorer.in_pairs else "The defence"
        self.step(f"4 · {who} answers", "What the defence does with the patched image.")
        self.answer = self.gr.HTML(elem_id="answer")
        self.rounds = self.gr.HTML(elem_id="rounds")

    def connect(self) -> None:
        shown, where = self.shown, [self.shown, self.kind, self.number]
        for listener, handler, given in (
            (self.blocks.load, self.of_kind, [shown, self.kind]),
            (self.cards.click, self.picked, [shown]),
            (self.own.upload, self.dropped, [shown, self.own]),
        ):
            done = self.on(listener, handler, given, busy=self.verdict, refused=self.own, **CLASSIFIER)
            # The cards mark the image that is shown. They are drawn once it is, for the kind and page chosen by then.
            self.on(done.then, self.turned, where, **CARDS)
        for listener, by in ((self.back.click, -1), (self.next.click, 1), (self.number.submit, 0)):
            self.on(listener, lambda event, *now, by=by: self.turned(event, *now, by=by), where, **CARDS)
        filtered = self.on(self.kind.input, self.turned, where[:2], trigger_mode="always_last", **CARDS)
        done = self.on(filtered.then, self.of_kind, [shown, self.kind], busy=self.verdict, **CLASSIFIER)
        self.on(done.then, self.turned, where, **CARDS)
        self.on(self.table.click, self.clicked, [shown])
        for slider in (self.first, self.second):
            self.on(slider.input, self.slid, [shown, self.first, self.second], trigger_mode="always_last")
        self.on(self.stage.click, self.pointed, [shown], **CLASSIFIER)
        for slider in (self.top, self.left):
            self.on(slider.input, self.moved, [shown, self.top, self.left], trigger_mode="always_last", **CLASSIFIER)
        settings = [shown, self.patch, self.size, self.seed, self.steps, self.file]
        for listener in (self.make.click, self.file.upload, self.size.input):
            self.on(listener, self.made, settings, busy=self.answer, refused=self.file, **CLASSIFIER)
        self.on(self.patch.input, self.kind_chosen, [self.patch])
        self.on(self.which.input, self.patch_chosen, [shown, self.which])

    def on(
        self, listener: Callable[..., Any], handler: Callable[..., Changes], inputs: list[Any], **options: Any
    ) -> Any:
        """Connect a handler: its errors become warnings, `busy` shows that it works, and a file in `refused` is taken
        out after an error. What is returned has `then`, to connect what follows."""
        busy, refused = options.pop("busy", None), options.pop("refused", None)

        def speaking(event, *values):  # type: ignore[no-untyped-def]
            try:
                return handler(event, *values) or self.gr.skip()
            except PatchproofError as error:
                words = str(error)
            except (torch.OutOfMemoryError, MemoryError):
                words = "out of memory; choose fewer masks, or another device"
            self.gr.Warning(draw.escaped(words))
            return {refused: None} if refused else self.gr.skip()

        speaking.__annotations__ = {"event": self.gr.EventData}  # how gradio knows that the event is wanted
        outputs = [self.shown, self.cards, self.number, self.verdict, self.table, self.first, self.second]
        outputs += [self.copy, self.stage, self.top, self.left, self.file, self.steps, self.answer, self.rounds]
        outputs += [self.own]
        progress = {"show_progress": "minimal", "show_progress_on": [busy]} if busy else {"show_progress": "hidden"}
        return listener(speaking, inputs, outputs, api_visibility="private", **progress, **options)

    def of_image(self, shown: Selection) -> Changes:
        words = verdict(shown.finding, self.explorer.name, self.explorer.defense)
        found = draw.message(shown.words) + draw.message(words)
        return {self.verdict: found} | self.of_table(shown) | self.of_patch(shown)

    def of_table(self, shown: Selection) -> Changes:
        copies = shown.finding.copies
        if copies is None:
            return {self.shown: shown}
        drawn = (draw.heat_map if self.explorer.in_pairs else draw.strip)(self.explorer, shown, copies)
        copy, (first, second) = draw.masked_copy(self.explorer, shown, copies), shown.cell
        return {self.shown: shown, self.table: drawn, self.copy: copy, self.first: first + 1, self.second: second + 1}

    def of_patch(self, shown: Selection) -> Changes:
        explorer, patched = self.explorer, shown.patched
        rounds = explorer.rounds(patched)
        promise = meaning(rounds, shown.finding, explorer.name, explorer.defense.guarantee)
        return {
            self.shown: shown,
            self.stage: draw.patched_view(shown, explorer.size),
            self.top: shown.one.rect.top,
            self.left: shown.one.rect.left,
            self.answer: draw.message(explain(rounds, explorer.name)) + draw.message(promise),
            self.rounds: draw.rounds_view(explorer, patched, rounds),
        }

    def picked(self, event: Any, shown: Selection | None) -> Changes:
        found = [record for record in self.explorer.records if str(record.index) == event.pick]
        return self.of_image(self.explorer.pick(found[0], shown)) if found else {}

    def of_kind(self, event: Any, shown: Selection | None, kind: str) -> Changes:
        """Show the first image of the chosen kind, unless an image of that kind or a visitor's own is shown."""
        records = self.explorer.of_kind(kind)
        if not records or (shown is not None and shown.index in {None, *(record.index for record in records)}):
            return {}
        return self.of_image(self.explorer.pick(records[0], shown))

    def dropped(self, event: Any, shown: Selection | None, file: str | None) -> Changes:
        return {} if file is None else self.of_image(self.explorer.own(Path(file), shown))

    def turned(self, event: Any, shown: Selection | None, kind: str, number: float = 1, *, by: int = 0) -> Changes:
        """Show a page of the images of this kind, or the nearest page that exists."""
        records = self.explorer.of_kind(kind)
        pages = max(1, math.ceil(len(records) / PAGE))
        page = max(1, min(int(number or 1) + by, pages))
        cards = draw.cards(self.explorer, records[(page - 1) * PAGE : page * PAGE], shown.index if shown else None)
        return {self.cards: cards, self.number: self.gr.update(value=page, label=f"Page, 1 to {pages:,}")}

    def clicked(self, event: Any, shown: Selection | None) -> Changes:
        first, second = map(int, event.pick.split())
        return self.slid(event, shown, first + 1, second + 1)

    def slid(self, event: Any, shown: Selection | None, first: float, second: float) -> Changes:
        shown = required(shown)
        if shown.finding.copies is None:
            return {}
        rows, columns = shown.finding.copies.labels.shape
        return self.of_table(replace(shown, cell=((int(first) - 1) % rows, (int(second) - 1) % columns)))

    def pointed(self, event: Any, shown: Selection | None) -> Changes:
        """Move the middle of the patch to where the click was."""
        shown, (rows, columns) = required(shown), self.explorer.size
        rect = shown.one.rect
        top, left = int(event.y * rows) - rect.height // 2, int(event.x * columns) - rect.width // 2
        return self.of_patch(shown.moved(top, left))

    def moved(self, event: Any, shown: Selection | None, top: float, left: float) -> Changes:
        return self.of_patch(required(shown).moved(top, left))

    def made(
        self, event: Any, shown: Selection | None, kind: str, size: int, seed: float, steps: float, file: str | None
    ) -> Changes:
        numbers = {"size": int(size), "seed": int(seed or 0), "steps": int(steps)}
        picture = None if file is None else Path(file)
        return self.of_patch(self.explorer.with_patch(required(shown), kind, file=picture, **numbers))

    def patch_chosen(self, event: Any, shown: Selection | None, which: int) -> Changes:
        shown = replace(required(shown), chosen=int(which))
        return {self.shown: shown, self.top: shown.one.rect.top, self.left: shown.one.rect.left}

    def kind_chosen(self, event: Any, kind: str) -> Changes:
        optimised = kind not in (NOISE, PICTURE)
        return {self.file: self.gr.update(visible=kind == PICTURE), self.steps: self.gr.update(visible=optimised)}


def required(shown: Selection | None) -> Selection:
    if shown is None:
        raise InputError("Pick an image first, or drop in your own.")
    return shown


@contextmanager
def serve(explorer: Explorer, *, host: str, port: int | None, open_browser: bool = False) -> Iterator[str]:
    """Serve the page at the address that is yielded, until the end of the block; uploads are deleted then."""
    require_address(host, port)  # gradio would try a hundred ports, for seconds each
    before = {name: os.environ.get(name) for name in ("GRADIO_TEMP_DIR", "no_proxy")}
    with tempfile.TemporaryDirectory(prefix="patchproof-explore-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads  # read when gradio is imported and at each upload
        gr, page = require_gradio(), ExplorerPage(explorer).blocks
        # gradio asks its own page whether it is there; it must not ask through a proxy.
        direct = f"{os.environ.get('no_proxy') or os.environ.get('NO_PROXY') or ''},{host},localhost"
        os.environ["no_proxy"] = ",".join(dict.fromkeys(filter(None, direct.split(","))))
        fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
        try:
            try:
                _, url, _ = page.queue(api_open=False).launch(
                    server_name=host,
                    server_port=port,
                    inbrowser=open_browser,
                    share=False,
                    quiet=True,
                    prevent_thread_lock=True,
                    ssr_mode=False,
                    footer_links=[],
                    max_file_size=UPLOAD_LIMIT,
                    theme=gr.themes.Default(primary_hue="blue", **fonts),
                    css=resources.files("patchproof.explore").joinpath("page.css").read_text("utf-8"),
                    _frontend=False,
                )
            except Exception as error:  # gradio and its HTTP client raise many kinds
                reason = str(error).partition("\n")[0] or type(error).__name__
                hint = "is anything between this machine and itself, e.g. a proxy or a firewall?"
                raise CheckError(f"the page does not answer on {host}: {reason}; {hint}") from error
            yield url
        finally:
            try:
                page.close(verbose=False)
            except RuntimeError:  # it wakes waiting coroutines from this thread while others come and go
                page.server.close()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
