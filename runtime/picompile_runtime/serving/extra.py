"""Whether the packages of the extra `serve` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from picompile_runtime.errors import RequestError

# As they are imported, and only by `picompile_runtime.serving`.
PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")


def require_extra(package: str) -> None:
    """Raise RequestError unless all that serving needs is installed; `package` is the one whose extra is to be."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise RequestError(f"serving needs {', '.join(missing)}: pip install '{package}[serve]'")
