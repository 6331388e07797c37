"""The history of what was typed in chats, kept in a file that only its owner may read."""

import os
from contextlib import suppress
from pathlib import Path

from picompile.cli.chat_screen import say

_MOST_ENTRIES = 1000


def history_path() -> Path | None:
    """Return the history's file, $XDG_STATE_HOME/picompile/chat_history; None for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the specification has relative paths ignored
        state = os.path.expanduser("~/.local/state")
    return Path(state) / "picompile" / "chat_history" if os.path.isabs(state) else None


class ChatHistory:
    """The entries of earlier chats, and those of this one, which are appended one by one: other chats may do so, too.

    Where the file cannot be read or written, that is said once.
    """

    def __init__(self, path: Path | None) -> None:
        """Keep the history in `path`; None keeps none."""
        self._path = path

    def load(self) -> list[str]:
        """Return the entries, the newest last. A file that has grown large is cut."""
        if self._path is None:
            return []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
            if len(lines) > 2 * _MOST_ENTRIES:
                _replace(self._path, "".join(f"{line}\n" for line in lines[-_MOST_ENTRIES:]))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(self._path, error)
            return []
        return [_unescaped(line) for line in lines[-_MOST_ENTRIES:]]

    def append(self, entry: str) -> None:
        """Add an entry, which may have several lines."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _append(self._path, f"{_escaped(entry)}\n")
        except OSError as error:
            self._give_up(self._path, error)

    def _give_up(self, path: Path, error: OSError) -> None:
        self._path = None
        say(f"the history of what is typed cannot be kept in {path}: {error.strerror}")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        _append(temporary, text)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _append(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(handle, 0o600)
        os.write(handle, text.encode("utf-8", "replace"))  # at once, so that no other chat writes in between
    finally:
        os.close(handle)


# An entry of several lines is one line of the file.


def _escaped(entry: str) -> str:
    return entry.replace("\\", "\\\\").replace("\n", "\\n")


def _unescaped(line: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in line.split("\\\\"))
