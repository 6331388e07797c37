"""Outputs that appear at their path whole or not at all, written by one process at a time.

| module | is about |
| --- | --- |
| `place` | checks of an output path before any work, and the path while this process alone writes to it |
| `lock` | the lock on an output path, and the hidden file that carries it |
| `leftovers` | renaming and syncing, and removal of what writers that died left beside their outputs |
| `files` | single files inside a folder that is already reserved; full-disk errors; hard links; safetensors headers |

A writer of `NAME` holds the lock on it from its first check to its end. Until it is done, everything it makes is called
`.NAME.<16 hex digits>.partial`, and only the holder of the lock may have such files. So a process that gets the lock
removes such files: a writer that died has left them. No process ever judges by age or by process number.
"""

from picompile.output.files import DISK_FULL, atomic_file, explaining_write_errors, link_tree, parents_of
from picompile.output.leftovers import discard
from picompile.output.place import OutputPath, reserve, writing_file

__all__ = [
    "DISK_FULL",
    "OutputPath",
    "atomic_file",
    "discard",
    "explaining_write_errors",
    "link_tree",
    "parents_of",
    "reserve",
    "writing_file",
]
