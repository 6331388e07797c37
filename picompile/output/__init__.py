"""Outputs that appear at their path whole or not at all, written by one process at a time.

| module | is about |
| --- | --- |
| `checks` | preconditions of writing: a free path, a folder for it, disk space |
| `place` | an output path that this process alone writes to, and the folder or file that replaces it |
| `lock` | the lock on an output path, and the hidden file that carries it |
| `leftovers` | removal of files that dead writers left beside their outputs |
| `rename` | renaming without overwriting, swapping two names, and syncing to disk |
| `files` | single files inside a folder that is already reserved; full-disk errors; hard links; parent folders |
| `safetensors_file` | the header of a safetensors file that is written tensor by tensor |

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
