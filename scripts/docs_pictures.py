"""Run every command of the tutorial and the how-to pages; put its output below it and its pictures into docs/images.

    python scripts/docs_pictures.py               # about fifteen minutes on two cores
    python scripts/docs_pictures.py --keep DIR    # work in DIR, where an earlier call may have left its runs

In a page, a `console` block holds commands after `$ ` and what they printed; a `python` block whose first line is a
comment with a file name is that file. All pages share one folder and come in the order of PAGES.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (
    "tutorial.md",
    "howto/certificate.md",
    "howto/masks.md",
    "howto/own-model.md",
    "howto/own-data.md",
    "howto/many-gpus.md",
    "howto/speed.md",
)
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.py)\n")
PROGRESS = re.compile(r"\d+/\d+  \d+:\d\d:\d\d, .* left  ")
MOST_BYTES = 150_000

PICTURES = {
    "runs/report/figures/worst-masks.png": "worst-masks.png",
    "runs/demo/report/figures/worst-masks.png": "demo-worst-masks.png",
    "runs/greedy/certify-6x6/report/figures/classes.png": "classes.png",
    "runs/greedy/certify-6x6/report/figures/margins.png": "margins.png",
    "runs/masks/report/figures/by-masks.png": "by-masks.png",
}
"""What the commands leave -> what the pages show."""

PAGES_SHOT = {
    "runs/greedy/certify-6x6/report/index.html": ("report-one.png", 1280, 860),
}
"""Reports as a browser shows them: file, window width and height."""


@dataclass(frozen=True)
class Place:
    """Where the commands run, and with which environment."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        commands = Path(sys.executable).parent
        paths = f"{commands}{os.pathsep}{os.environ['PATH']}"
        settings = {"PATH": paths, "COLUMNS": "96", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **settings}

    def output_of(self, command: str) -> str:
        """What one command line prints, errors included; a failure is part of the page too (its exit code is not).
        Progress is left out: it tells of the machine's other work."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines = [line.rstrip() for line in done.stdout.split("\n") if line.strip() and not PROGRESS.match(line)]
        return "".join(f"{line}\n" for line in lines)


def refreshed(page: str, place: Place) -> str:
    """The page with every file written, every command run, and its output below it."""

    def block(match: re.Match[str]) -> str:
        kind, content = match[1], match[2]
        if kind == "python":
            name = FILE_NAME.match(content)
            if name:
                (place.folder / name[1]).write_text(content, encoding="utf-8")
            return match[0]
        return f"```console\n{''.join(transcript(content, place))}```"

    return BLOCK.sub(block, page)


def transcript(content: str, place: Place) -> Iterator[str]:
    for lines in command_lines(content):
        yield lines
        command = "\n".join(line[2:] for line in lines.splitlines())
        print(f"$ {command}", flush=True)
        printed = place.output_of(command)
        print(printed, flush=True)
        yield printed


def command_lines(content: str) -> Iterator[str]:
    """Each command of a console block: a line after `$ `, and those after `> ` that go on with it."""
    found: list[str] = []
    for line in content.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append(line)
        elif line.startswith("> ") and found:
            found[-1] += line
    yield from found


def shrink(picture: Image.Image, *, width: int = 1000) -> bytes:
    """A PNG of at most MOST_BYTES: smaller and in fewer colours until it fits."""
    for scale, colours in ((1.0, 256), (1.0, 64), (0.8, 64), (0.6, 64), (0.5, 32)):
        wide = min(picture.width, round(width * scale))
        small = picture.convert("RGB").resize(
            (wide, round(picture.height * wide / picture.width)), Image.Resampling.LANCZOS
        )
        file = io.BytesIO()
        small.quantize(colours).save(file, "PNG", optimize=True)
        if file.tell() <= MOST_BYTES:
            return file.getvalue()
    raise ValueError(f"a picture of {picture.size} stays above {MOST_BYTES} bytes")


def screenshot(page: Path, width: int, height: int) -> Image.Image | None:
    """The top of a page in headless Chromium; None where there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no chromium: the screenshots stay as they are", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        window = [f"--window-size={width},{height}", f"--screenshot={shot}", f"file://{page.resolve()}"]
        settings = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        subprocess.run([browser, *settings, *window], check=True, capture_output=True, timeout=120)
        return Image.open(io.BytesIO(shot.read_bytes()))


def side_by_side(*files: Path, enlarge: int = 8, gap: int = 24) -> Image.Image:
    """Small images, enlarged pixel by pixel, in a row."""
    images = [Image.open(file).convert("RGB") for file in files]
    images = [i.resize((i.width * enlarge, i.height * enlarge), Image.Resampling.NEAREST) for i in images]
    row = Image.new("RGB", (sum(i.width for i in images) + gap * (len(images) - 1), images[0].height), "white")
    left = 0
    for image in images:
        row.paste(image, (left, 0))
        left += image.width + gap
    return row


def write_pictures(folder: Path) -> None:
    """What the commands have left in `folder`, small enough for the repository."""
    target = DOCS / "images"
    target.mkdir(exist_ok=True)
    for made, shown in PICTURES.items():
        (target / shown).write_bytes(shrink(Image.open(folder / made)))
    for made, (shown, width, height) in PAGES_SHOT.items():
        shot = screenshot(folder / made, width, height)
        if shot is not None:
            (target / shown).write_bytes(shrink(shot))
    sticker = side_by_side(folder / "photo.png", folder / "patched.png")
    (target / "sticker.png").write_bytes(shrink(sticker))


def run_pages(pages: Sequence[str], place: Place) -> None:
    if not (place.folder / "runs" / "demo").exists():
        place.output_of("patchproof demo")
    for name in pages:
        page = DOCS / name
        page.write_text(refreshed(page.read_text("utf-8"), place), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="work in this folder instead of a temporary one")
    parser.add_argument("--pages", nargs="*", default=PAGES, help="only these pages; default: all")
    parser.add_argument("--pictures-only", action="store_true", help="run nothing, only take the pictures of --keep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not options.pictures_only:
            run_pages(options.pages, Place(folder.resolve()))
        write_pictures(folder)


if __name__ == "__main__":
    main()
