"""Loading an artifact for a command, and telling the user what of its weights makes it slower than planned."""

import os

from picompile.processes import seldom_collected
from picompile.progress import Progress
from picompile_runtime import load
from picompile_runtime.engine.engine import Engine


def load_engine(artifact: str | os.PathLike[str], threads: int | None, replan: bool, progress: Progress) -> Engine:
    """Return the engine of `picompile_runtime.load`, shown as a step of `progress`. Raises as that does."""
    with progress.step("check and load"), seldom_collected():
        engine = load(artifact, threads, replan)
    if engine.moved_bytes:
        progress.say(
            f"{engine.moved_bytes / 2**30:.2f} GiB of weights that were planned for the GPU stay with the host, since "
            "less of the GPU's memory is free; the GPU reads them over the bus; compiled with a smaller --vram-budget, "
            "the model is faster"
        )
    if engine.unpinned_bytes:
        progress.say(
            f"the system cannot pin the {engine.unpinned_bytes / 2**30:.2f} GiB from which the GPU gets weights for "
            "prompts, so they are copied through buffers, and prompts take longer; close other programs and load the "
            "model again"
        )
    return engine
