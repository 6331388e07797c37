"""Files in the place of a model's: a pointer of Git LFS, or a web page that was downloaded."""

from __future__ import annotations

START_BYTES = 256  # a pointer is shorter, and a page begins with its doctype
# The first line of a pointer: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


def describe_stand_in(start: bytes) -> str | None:
    """Return what a file is and what to do, given its first `START_BYTES`; None if it may be the file itself."""
    if start.startswith(_POINTER):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
    if start[:START_BYTES].lstrip().lower().startswith(_PAGES):
        return "is a web page, such as one that asks for a login, not the file itself; download it again"
    return None
