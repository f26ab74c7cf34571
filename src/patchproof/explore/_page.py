"""The page itself, in gradio: what is on it, and what each control does."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from typing import Any

import torch

from patchproof.explore import _draw as draw
from patchproof.explore._desk import DEFENDED, NOISE, PATCH_KINDS, PICTURE, UNDEFENDED, Desk, Scene
from patchproof.explore._explorer import UPLOAD_LIMIT, Explorer
from patchproof.explore._words import patch_words
from patchproof.types import InputError, PatchproofError

PICK_CARD = """element.addEventListener('click', event => {
  const card = event.target.closest('[data-index]');
  if (card) trigger('click', {index: Number(card.dataset.index)});
});"""
PICK_CELL = """element.addEventListener('click', event => {
  const cell = event.target.closest('[data-a]');
  if (cell) trigger('click', {a: Number(cell.dataset.a), b: Number(cell.dataset.b)});
});"""
PICK_PLACE = """element.addEventListener('click', event => {
  const stage = event.target.closest('.pp-stage');
  if (!stage) return;
  const box = stage.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / box.height * Number(stage.dataset.height));
  const column = Math.floor((event.clientX - box.left) / box.width * Number(stage.dataset.width));
  trigger('click', {row, column});
});"""

Shown = dict[Any, Any]
"""New values of some components; the others stay as they are."""


def require_gradio() -> Any:
    """gradio, or the way to get it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise InputError("the explorer needs gradio; install it with: pip install 'patchproof[explore]'") from error
    return gradio


def build_page(explorer: Explorer) -> Any:
    """The page as gradio Blocks, with every control connected."""
    return _Page(require_gradio(), explorer).blocks


class _Page:
    """The controls, section by section, then what each of them does.

    A handler gets the event, then the inputs' values, and returns what changes. gradio's types are not annotated:
    it is imported only when a page is made.
    """

    def __init__(self, gr: Any, explorer: Explorer) -> None:
        self.gr, self.explorer, self.desk = gr, explorer, Desk(explorer)
        with gr.Blocks(title="patchproof explore", analytics_enabled=False) as self.blocks:
            self.scene = gr.State(None)
            gr.HTML(self._head())
            with gr.Row():
                with gr.Column(scale=2, min_width=300):
                    self._image_section()
                with gr.Column(scale=3, min_width=300):
                    self._table_section()
            with gr.Row():
                with gr.Column(scale=2, min_width=300):
                    self._patch_section()
                with gr.Column(scale=3, min_width=300):
                    self._rounds_section()
            self._wire_images()
            self._wire_table()
            self._wire_patch()

    def _head(self) -> str:
        notices = "".join(draw.message(text, kind="note") for text in self.explorer.notices)
        return f'<div class="pp-head"><h1>patchproof</h1><p>{draw.escaped(self.explorer.title)}</p></div>{notices}'

    def _step(self, title: str, words: str) -> None:
        self.gr.HTML(f'<div class="pp-step"><h2>{title}</h2><p>{draw.escaped(words)}</p></div>')

    def _image_section(self) -> None:
        gr, images = self.gr, self.explorer.images
        self._step("1 · An image", "Pick one, or drop in your own.")
        kinds = images.kinds if images else ("all",)
        offered = images is not None
        self.kind = gr.Radio(list(kinds), value="all", label="Show", visible=len(kinds) > 1, elem_id="kind")
        self.cards = gr.HTML(js_on_load=PICK_CARD, elem_id="cards", visible=offered)
        with gr.Row(visible=offered, elem_id="pages"):
            self.back = gr.Button("‹", size="sm", min_width=40, elem_id="back")
            self.number = gr.Number(1, label="Page", precision=0, minimum=1, min_width=90, elem_id="page-number")
            self.next = gr.Button("›", size="sm", min_width=40, elem_id="next")
        limit = UPLOAD_LIMIT // 1024**2
        self.own = gr.File(label=f"Your own image (at most {limit} MB)", elem_id="own", height=150)
        self.message = gr.HTML(elem_id="message")

    def _table_section(self) -> None:
        gr, count = self.gr, len(self.explorer.defense.masks)
        self._step("2 · Under two masks", "One cell a pair of masks. Click a cell to see that copy of the image.")
        self.verdict = gr.HTML(elem_id="verdict")
        self.heat = gr.HTML(js_on_load=PICK_CELL, elem_id="heat")
        with gr.Row():
            self.first = gr.Slider(1, count, 1, step=1, label="First mask", min_width=120, elem_id="first-mask")
            self.second = gr.Slider(1, count, 1, step=1, label="Second mask", min_width=120, elem_id="second-mask")
        self.copy = gr.HTML(elem_id="copy")

    def _patch_section(self) -> None:
        gr, threat = self.gr, self.explorer.defense.threat
        (height, width), sizes = self.explorer.size, threat.patch_sizes
        self._step("3 · Under a patch", f"Click the image to move the {patch_words(threat)} patch there.")
        self.stage = gr.HTML(js_on_load=PICK_PLACE, elem_id="stage")
        low, wide = height - min(h for h, _ in sizes), width - min(w for _, w in sizes)
        with gr.Row():
            self.top = gr.Slider(0, low, 0, step=1, label="Patch row", min_width=120, elem_id="patch-row")
            self.left = gr.Slider(0, wide, 0, step=1, label="Patch column", min_width=120, elem_id="patch-column")
        names = [(f"{h}×{w} pixels", i) for i, (h, w) in enumerate(sizes)]
        self.size = gr.Radio(names, value=0, label="Patch size", visible=len(sizes) > 1, elem_id="patch-size")
        self.patch = gr.Radio(list(PATCH_KINDS), value=NOISE, label="What is on it", elem_id="patch-kind")
        self.file = gr.File(label="Picture for the patch", visible=False, height=150, elem_id="patch-file")
        self.steps = gr.Slider(5, 200, 40, step=5, label="Steps of the optimisation", visible=False, elem_id="steps")
        self.seed = gr.Number(0, label="Seed of the randomness", precision=0, minimum=0, elem_id="seed")
        self.make = gr.Button("Make the patch", variant="primary", elem_id="make")

    def _rounds_section(self) -> None:
        self._step("4 · Double masking answers", "What the defence does with the patched image.")
        self.patch_message = self.gr.HTML(elem_id="patch-message")
        self.told = self.gr.HTML(elem_id="told")
        self.rounds = self.gr.HTML(elem_id="rounds")

    def _wire_images(self) -> None:
        inputs = [self.scene, self.kind, self.number]
        changed = [self.scene, self.message, self.verdict, self.heat, self.copy, self.first, self.second]
        changed += [self.patch_message, self.stage, self.told, self.rounds, self.top, self.left]
        pages = [self.message, self.cards, self.number]
        turns: dict[str, Any] = {"concurrency_id": "cards", "concurrency_limit": 1}
        for listener, handler, given in (
            (self.blocks.load, self.opened, inputs[:1]),
            (self.cards.click, self.picked, inputs[:1]),
            (self.own.upload, self.dropped, [self.scene, self.own]),
        ):
            done = self._on(listener, handler, given, changed, heavy=True, busy=self.verdict)
            # The cards mark the image that is shown. They are drawn once it is, for the kind and page chosen by then.
            self._on(done.then, lambda event, *now: self.turned(*now), inputs, pages, **turns)
        for listener, by in ((self.back.click, -1), (self.next.click, 1), (self.number.submit, 0)):
            self._on(listener, lambda event, *now, by=by: self.turned(*now, by=by), inputs, pages, **turns)
        chosen: dict[str, Any] = {"trigger_mode": "always_last", **turns}
        self._on(self.kind.input, lambda event, scene, kind: self.turned(scene, kind, 1), inputs[:2], pages, **chosen)

    def _wire_table(self) -> None:
        changed = [self.scene, self.message, self.heat, self.copy, self.first, self.second]
        self._on(self.heat.click, self.clicked, [self.scene], changed)
        for slider in (self.first, self.second):
            self._on(
                slider.input, self.slid, [self.scene, self.first, self.second], changed, trigger_mode="always_last"
            )

    def _wire_patch(self) -> None:
        changed = [self.scene, self.patch_message, self.stage, self.told, self.rounds, self.top, self.left]
        about = {"heavy": True, "message": self.patch_message}
        self._on(self.stage.click, self.pointed, [self.scene], changed, **about)
        for slider in (self.top, self.left):
            where = [self.scene, self.top, self.left]
            self._on(slider.input, self.moved, where, changed, trigger_mode="always_last", **about)
        settings = [self.scene, self.patch, self.size, self.seed, self.steps, self.file]
        for listener in (self.make.click, self.file.upload, self.size.input):
            self._on(listener, self.made, settings, changed, busy=self.told, **about)
        self._on(self.patch.input, self.kind_chosen, [self.patch], [self.file, self.steps])

    def _on(
        self,
        listener: Callable[..., Any],
        handler: Callable[..., Shown],
        inputs: list[Any],
        outputs: list[Any],
        *,
        heavy: bool = False,
        message: Any = None,
        busy: Any = None,
        **options: Any,
    ) -> Any:
        """Connect a handler; what it complains about becomes a line on the page. Heavy ones take turns, and show on
        `busy` that they work. What comes back has `then`, to connect what follows."""
        place = message or self.message

        def speaking(event, *values):  # type: ignore[no-untyped-def]
            try:
                return handler(event, *values)
            except PatchproofError as error:
                words = str(error)
            except (torch.OutOfMemoryError, MemoryError):
                words = "out of memory; choose fewer masks, or another --device"
            return {place: draw.message(words)}

        speaking.__annotations__ = {"event": self.gr.EventData}  # how gradio knows that the event is wanted
        turns: dict[str, Any] = {"concurrency_id": "classifier", "concurrency_limit": 1} if heavy else {}
        outputs = outputs if place in outputs else [*outputs, place]
        shown = {"show_progress": "minimal", "show_progress_on": [busy]} if busy else {"show_progress": "hidden"}
        return listener(speaking, inputs, outputs, api_visibility="private", **shown, **turns, **options)

    def _all(self, scene: Scene) -> Shown:
        return self._table(scene) | self._patch(scene)

    def _table(self, scene: Scene) -> Shown:
        verdict, heat, copy = self.desk.table_view(scene)
        shown = {self.verdict: verdict, self.heat: heat, self.copy: copy, self.message: ""}
        return shown | {self.scene: scene, self.first: scene.cell[0] + 1, self.second: scene.cell[1] + 1}

    def _patch(self, scene: Scene) -> Shown:
        stage, told, rounds = self.desk.patch_view(scene)
        shown = {self.stage: stage, self.told: told, self.rounds: rounds, self.patch_message: ""}
        return shown | {self.scene: scene, self.top: scene.top, self.left: scene.left}

    def opened(self, event: Any, scene: Scene | None) -> Shown:
        images = self.explorer.images
        if images is None or not images.choices:
            raise InputError("No images are on offer here; drop in one of your own.")
        return self._all(self.desk.pick(images.choices[0], scene))

    def picked(self, event: Any, scene: Scene | None) -> Shown:
        return self._all(self.desk.pick(self.desk.choice(int(event.index)), scene))

    def dropped(self, event: Any, scene: Scene | None, file: str | None) -> Shown:
        return {} if file is None else self._all(self.desk.own(file, scene))

    def turned(self, scene: Scene | None, kind: str, number: float, *, by: int = 0) -> Shown:
        cards, number, pages = self.desk.page_of(kind, int(number or 1) + by, scene)
        return {self.cards: cards, self.number: self.gr.update(value=number, label=f"Page of {pages:,}")}

    def clicked(self, event: Any, scene: Scene | None) -> Shown:
        return self._cell(scene, int(event.a), int(event.b))

    def slid(self, event: Any, scene: Scene | None, first: float, second: float) -> Shown:
        return self._cell(scene, int(first) - 1, int(second) - 1)

    def _cell(self, scene: Scene | None, a: int, b: int) -> Shown:
        count = len(self.explorer.defense.masks)
        shown = self._table(replace(_required(scene), cell=(a % count, b % count)))
        del shown[self.verdict]
        return shown

    def pointed(self, event: Any, scene: Scene | None) -> Shown:
        there = _required(scene)
        height, width = there.patch.shape[1:]
        return self._patch(there.moved(int(event.row) - height // 2, int(event.column) - width // 2))

    def moved(self, event: Any, scene: Scene | None, top: float, left: float) -> Shown:
        return self._patch(_required(scene).moved(int(top), int(left)))

    def made(
        self, event: Any, scene: Scene | None, kind: str, size: int, seed: float, steps: float, file: str | None
    ) -> Shown:
        chosen = {"size": int(size), "seed": int(seed or 0), "steps": int(steps)}
        return self._patch(self.desk.with_patch(_required(scene), kind, file=file, **chosen))

    def kind_chosen(self, event: Any, kind: str) -> Shown:
        optimised = kind in (UNDEFENDED, DEFENDED)
        return {self.file: self.gr.update(visible=kind == PICTURE), self.steps: self.gr.update(visible=optimised)}


def _required(scene: Scene | None) -> Scene:
    if scene is None:
        raise InputError("Pick an image first, or drop in your own.")
    return scene


@contextmanager
def serve(explorer: Explorer, *, host: str, port: int | None, open_browser: bool = False) -> Iterator[str]:
    """The page at the address yielded, until the end of the block; uploads are deleted then."""
    _require_address(host, port)
    with tempfile.TemporaryDirectory(prefix="patchproof-explore-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads  # read when gradio is imported and at each upload
        gr = require_gradio()
        page = build_page(explorer)
        fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
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
            )
        except OSError as error:  # somebody else was faster
            raise InputError(f"cannot listen on {host}: {error}; choose another --host or --port") from error
        try:
            yield url
        finally:
            page.close(verbose=False)


def _require_address(host: str, port: int | None) -> None:
    """Refuse at once an address that cannot be had; gradio would try a hundred ports, seconds each."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        place = f"{host}, port {port}" if port else host
        raise InputError(f"cannot listen on {place}: {error}; choose another --host or --port") from error
