"""The models on the hub that the documents name, on a hub of the tests: the bundled model stands for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.fake_hub import FakeHub
from helpers.gguf_files import byte_level_metadata, save_example
from helpers.support import BUNDLED_MODEL

ON_THE_HUB = ("Qwen/Qwen3-0.6B", "unsloth/Qwen3-0.6B-GGUF")


@contextmanager
def hub_of_documents(folder: Path) -> Iterator[FakeHub]:
    """Serve the models while the block runs; `folder` is for a file that is made."""
    with FakeHub() as hub:
        for name in ON_THE_HUB:
            if name.endswith("GGUF"):
                file = save_example(folder, "llama", "Q8_0", **byte_level_metadata(), **{"llama.context_length": 1024})
                hub.add(name, {f"{name}-{label}.gguf": file.read_bytes() for label in ("Q4_K_M", "Q8_0")})
            else:
                hub.add_folder(name, BUNDLED_MODEL)
        yield hub
