"""Models that are compiled when they are first used, and kept: the library.

    with open_model("Qwen/Qwen3-0.6B", LibraryOptions(), progress) as model:
        engine = picompile_runtime.load(model.artifact)

`chat`, `run`, `serve` and others take a MODEL by this. An artifact is used as it is; a checkpoint or a GGUF file is
compiled once; a model on the hub is downloaded before that.
"""

from picompile.library.entry import Entry
from picompile.library.options import LibraryOptions
from picompile.library.store import Library
from picompile.library.use import OpenModel, open_compiled, open_entry, open_model

__all__ = ["Entry", "Library", "LibraryOptions", "OpenModel", "open_compiled", "open_entry", "open_model"]
