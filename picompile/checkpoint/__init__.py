"""Weights of a Hugging Face folder: safetensors, sharded or not, read one tensor at a time.

Everything that can be wrong with a checkpoint and shows in its headers is found before any weight is read.
"""

from picompile.checkpoint.headers import INDEX_FILE, SINGLE_FILE, TensorHeader, check_folder, read_headers
from picompile.checkpoint.names import DTYPES, ExpectedTensor, match_names, ties_hold
from picompile.checkpoint.weights import FolderWeights, ModuleWeights

__all__ = [
    "DTYPES",
    "INDEX_FILE",
    "SINGLE_FILE",
    "ExpectedTensor",
    "FolderWeights",
    "ModuleWeights",
    "TensorHeader",
    "check_folder",
    "match_names",
    "read_headers",
    "ties_hold",
]
