"""Look at single images: what the defence makes of their masked copies, and of a patch on them."""

from patchproof.explore._explorer import UPLOAD_LIMIT, Explorer, Selection
from patchproof.explore._open import open_explorer
from patchproof.explore._page import require_gradio, serve

__all__ = ["UPLOAD_LIMIT", "Explorer", "Selection", "open_explorer", "require_gradio", "serve"]
