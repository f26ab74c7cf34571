"""Single images under a defence: their masked copies, and what happens if a patch is put on them."""

from patchproof.explore._explorer import UPLOAD_LIMIT as UPLOAD_LIMIT
from patchproof.explore._explorer import Explorer as Explorer
from patchproof.explore._open import open_explorer as open_explorer
from patchproof.explore._page import require_gradio as require_gradio
from patchproof.explore._page import serve as serve
