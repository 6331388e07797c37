"""GET /: the page for chats, one file of the package."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_INLINE = re.compile(rb"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def load_page() -> tuple[bytes, str]:
    """Return the page, and a Content-Security-Policy that allows only the page's own contents.

    Its scripts and styles are allowed by their hashes, so that text that a model writes can never become one.
    """
    content = resources.files(__package__).joinpath("page.html").read_bytes()
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for found in _INLINE.finditer(content):
        digest = base64.b64encode(hashlib.sha256(found[2]).digest()).decode()
        hashes[found[1].decode().lower()].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]) or "'none'",
        "style-src": " ".join(hashes["style"]) or "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return content, "; ".join(f"{name} {value}" for name, value in rules.items())


async def page(request: Request) -> Response:
    """Answer with the page."""
    content, policy = request.app.state.page
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(content, 200, headers, "text/html")
