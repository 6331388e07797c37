"""A folder's content in another folder, without copying it where the file system has hard links."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def link_tree(source: Path, target: Path, skip: Callable[[Path], bool] = lambda path: False) -> None:
    """Has `target` hold all that `source` does, but for paths, relative to `source`, of which `skip` is true.

    Files must be replaced and not changed from then on: both folders have the same ones.
    """
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(map(skip, (relative, *relative.parents))):
            continue
        new = target / relative
        if path.is_dir() and not path.is_symlink():
            new.mkdir(exist_ok=True)
            continue
        try:
            os.link(path, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(path, new, follow_symlinks=False)
