"""Look at single images: their two-mask table, and what double masking does with a patch on them."""

from patchproof.explore._explorer import UPLOAD_LIMIT, Choice, Explorer, Images
from patchproof.explore._page import build_page, require_gradio, serve
from patchproof.explore._patch import noise, optimise, paste, place
from patchproof.explore._rounds import Rounds, SecondRound, watch
from patchproof.explore._table import PairTable, pair_table
from patchproof.explore._words import explain, verdict

__all__ = [
    "UPLOAD_LIMIT",
    "Choice",
    "Explorer",
    "Images",
    "PairTable",
    "Rounds",
    "SecondRound",
    "build_page",
    "explain",
    "noise",
    "optimise",
    "pair_table",
    "paste",
    "place",
    "require_gradio",
    "serve",
    "verdict",
    "watch",
]
