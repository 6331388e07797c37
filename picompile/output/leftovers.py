"""What writers leave beside their outputs when they die, and its removal.

| name | is |
| --- | --- |
| `.NAME.<16 hex digits>.partial` | what was to become NAME, or served to make it, or was NAME before |
| `.NAME.<16 hex digits>.old` | what was NAME, moved aside where names cannot be exchanged |
| `.NAME.picompile-lock` | the lock on NAME |

Only the holder of the lock on NAME has such things, so the next holder removes them; an `.old` goes back to its place
if nothing is there. Versions before had no locks, and eight other characters for the digits: nobody can tell whether
their writers live, so such leftovers are removed by the next writer of NAME when nothing in them changed for a week.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from picompile.output.lock import dead_locks, names_in, stem_of
from picompile.output.rename import UnsupportedRenameError, rename_to_new

PARTIAL, OLD = "partial", "old"
_DIGITS = 16
# No compilation goes for so long without writing.
_SURELY_DEAD_S = 7 * 86400.0


def temporary_name(output: Path, kind: str) -> Path:
    """A new name beside `output`, for who holds the lock on it."""
    return output.with_name(f".{stem_of(output.name)}.{secrets.token_hex(_DIGITS // 2)}.{kind}")


def sweep(output: Path) -> None:
    """Removes leftovers of `output`, on which the lock is held, and of other dead writers in its folder."""
    _restore(output)
    remove = [*_of(output, PARTIAL), *_of(output, OLD), *_of_earlier_versions(output)]
    for name, lock in dead_locks(output.parent):
        other = output.with_name(name)
        _restore(other)
        for path in [*_of(other, PARTIAL), *_of(other, OLD)]:
            # Under a name of ours it is safe without the other lock, on which nobody shall wait for a large removal.
            mine = temporary_name(output, PARTIAL)
            with suppress(OSError):
                path.rename(mine)
                remove.append(mine)
        lock.release()
    for path in remove:
        discard(path)


def discard(path: Path) -> None:
    """Removes a folder or file of ours as far as that is possible; a signal to stop waits until that is done."""
    stopped: KeyboardInterrupt | None = None
    for _ in range(3):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
            break
        except KeyboardInterrupt as error:
            stopped = error
    if stopped is not None:
        raise stopped


def _restore(output: Path) -> None:
    """Puts back what a writer moved aside before it died, where nothing has taken the place."""
    if os.path.lexists(output):
        return
    for path in _of(output, OLD):
        with suppress(OSError, UnsupportedRenameError):
            if path.is_dir() and not path.is_symlink():
                path.rename(output)
            else:
                rename_to_new(path, output)
            return


def _of(output: Path, kind: str) -> Iterator[Path]:
    pattern = re.compile(rf"\.{re.escape(stem_of(output.name))}\.[0-9a-f]{{{_DIGITS}}}\.{kind}")
    return (output.with_name(name) for name in names_in(output.parent) if pattern.fullmatch(name))


def _of_earlier_versions(output: Path) -> Iterator[Path]:
    # As `tempfile` names them.
    pattern = re.compile(rf"\.{re.escape(output.name)}\.[a-z0-9_]{{8}}\.(partial|old|work|import)")
    for name in names_in(output.parent):
        path = output.with_name(name)
        # An earlier version moved what was there into `.old` first: without an output that may be all there is.
        if not pattern.fullmatch(name) or (name.endswith(OLD) and not os.path.lexists(output)):
            continue
        if _last_change_s(path) < time.time() - _SURELY_DEAD_S:
            yield path


def _last_change_s(path: Path) -> float:
    latest = 0.0
    for each in (path, *path.rglob("*")):
        with suppress(OSError):
            status = each.lstat()
            latest = max(latest, status.st_mtime, status.st_ctime)
    return latest or float("inf")
