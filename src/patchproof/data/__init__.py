"""Images and labels: find them, decode files to RGB, and make batches of network inputs."""

from patchproof.data._decode import MAX_PIXELS as MAX_PIXELS
from patchproof.data._decode import BadImageError as BadImageError
from patchproof.data._decode import decode as decode
from patchproof.data._decode import reading as reading
from patchproof.data._decode import to_rgb as to_rgb
from patchproof.data._loading import BadImage as BadImage
from patchproof.data._loading import Batch as Batch
from patchproof.data._loading import Decoded as Decoded
from patchproof.data._loading import default_preprocessing as default_preprocessing
from patchproof.data._loading import evenly_spread as evenly_spread
from patchproof.data._loading import iterate_batches as iterate_batches
from patchproof.data._loading import load_groups as load_groups
from patchproof.data._loading import preprocess as preprocess
from patchproof.data._loading import require_workers as require_workers
from patchproof.data._loading import spread_indices as spread_indices
from patchproof.data._named import DATASETS as DATASETS
from patchproof.data._named import NoSplitError as NoSplitError
from patchproof.data._named import open_dataset as open_dataset
from patchproof.data._sources import EXTENSIONS as EXTENSIONS
from patchproof.data._sources import ArraySource as ArraySource
from patchproof.data._sources import FolderSource as FolderSource
from patchproof.data._sources import ImageSource as ImageSource
from patchproof.data._sources import SequenceSource as SequenceSource
from patchproof.data._sources import as_source as as_source
from patchproof.data._sources import open_class_folders as open_class_folders
from patchproof.data._sources import unit_floats as unit_floats
