"""Outputs: what appears at a path whole or not at all, written by one process at a time.

| module | is about |
| --- | --- |
| `place` | a path that this process alone writes to, and the folder or file that takes it |
| `lock` | the lock on an output path, and the hidden file that carries it |
| `leftovers` | what dead writers left beside their outputs, and how it is removed |
| `rename` | renaming without overwriting, and exchanging two names |
| `links` | one folder's files in another, for what replaces a folder that others fill too |
| `parents` | the folders above an output |
| `files` | single files inside a folder that is written to already |
| `full` | a full disk, told in one line that names the folder |

A writer of `NAME` holds the lock on it from its first check to its end. All that it makes before it is done is called
`.NAME.<16 hex digits>.partial`, and only the holder of the lock may have such a thing: so whoever gets the lock knows
that what is there was left by a writer that died, and removes it. No process ever judges by age or by process number.
"""

from picompile.output.files import DISK_FULL, appearing_file, link_tree, parents_of, write_errors_told
from picompile.output.leftovers import discard
from picompile.output.place import OutputPath, replacing, reserve, writing_file

__all__ = [
    "DISK_FULL",
    "OutputPath",
    "appearing_file",
    "discard",
    "link_tree",
    "parents_of",
    "replacing",
    "reserve",
    "write_errors_told",
    "writing_file",
]
