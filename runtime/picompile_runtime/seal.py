"""The hash of manifest.json that manifest.json itself has: that of its bytes with zeros in the place of the hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

KEY = "sha256"
_ZEROS = "0" * 64


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return `content` as the bytes of a manifest.json, with its hash."""
    others = {key: value for key, value in content.items() if key != KEY}
    text = (json.dumps({**others, KEY: _ZEROS}, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass")
    # From the end: the model's facts come from the checkpoint, and a name may have zeros.
    before, _, after = text.rpartition(_ZEROS.encode())
    return before + hashlib.sha256(text).hexdigest().encode() + after


def is_sealed(text: bytes, own: str) -> bool:
    """Return whether `own`, the hash in the manifest `text`, is its hash."""
    before, found, after = text.rpartition(own.encode(errors="replace"))
    return bool(found) and hashlib.sha256(before + _ZEROS.encode() + after).hexdigest() == own
