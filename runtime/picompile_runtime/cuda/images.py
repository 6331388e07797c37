"""The GPU code of an artifact: `kernels/device.json`, which says how kernels are launched, and two forms of the code.

{"sm": 89, "ptx_sm": 89, "kernels": {"add": [{"symbol": "add_kernel", "grid": [8, 1, 1], "block": [256, 1, 1],
                                              "args": [0, 2], "registers": 40, …}]}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from picompile_runtime.errors import ArtifactError
from picompile_runtime.fields import Fields, parse_object
from picompile_runtime.interfaces import Interface, parse_interfaces

# Limits of every compute capability since 3.0; CUDA C++ Programming Guide, "Technical Specifications".
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_THREADS = (1024, 1024, 64)
_MOST_THREADS_OF_BLOCK = 1024
_MOST_ARGS = 4096 // 8  # 4 KiB of parameters, each an address
_LEAST_SM, _MOST_SM = 50, 999


@dataclass(frozen=True)
class Launch:
    """A launch of `symbol`. `args` says which of the call's arguments are its parameters, in their order."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[int, ...]


@dataclass(frozen=True)
class DeviceImages:
    """`cubin` for the compute capability `sm` / 10, `ptx` for `ptx_sm` / 10, the launches of each kernel, and what the
    kernels declare; None where the file does not say.
    """

    sm: int
    ptx_sm: int
    cubin: bytes
    ptx: bytes
    kernels: Mapping[str, tuple[Launch, ...]]
    interfaces: Mapping[str, Interface] | None = None


def read_images(text: bytes, cubin: bytes, ptx: bytes, where: str) -> DeviceImages:
    """The images with what `text`, a device.json, says of them; errors call it `where`. Raises ArtifactError."""
    root = parse_object(text, where)
    kernels = root.object("kernels")
    return DeviceImages(
        sm=root.integer("sm", _LEAST_SM, _MOST_SM),
        ptx_sm=root.integer("ptx_sm", _LEAST_SM, _MOST_SM),
        cubin=cubin,
        ptx=ptx,
        kernels={name: _launches(kernels, name) for name in kernels.data},
        interfaces=parse_interfaces(root.object("interfaces")) if "interfaces" in root.data else None,
    )


def _launches(kernels: Fields, name: str) -> tuple[Launch, ...]:
    launches = tuple(_launch(fields) for fields in kernels.objects(name))
    if not launches:
        raise kernels.wrong(name, "a list of one launch or more")
    return launches


def _launch(fields: Fields) -> Launch:
    symbol = fields.text("symbol")
    if not symbol.isascii() or not symbol.isidentifier():
        raise fields.wrong("symbol", "the name of a function")
    block = _extents(fields, "block", _MOST_THREADS)
    if math.prod(block) > _MOST_THREADS_OF_BLOCK:
        raise fields.wrong("block", f"of {_MOST_THREADS_OF_BLOCK} threads or fewer")
    return Launch(symbol, _extents(fields, "grid", _MOST_BLOCKS), block, _args(fields))


def _extents(fields: Fields, key: str, most: tuple[int, int, int]) -> tuple[int, int, int]:
    value = fields.data.get(key)
    if isinstance(value, list) and len(value) == 3:
        x, y, z = value
        if all(type(item) is int and 1 <= item <= limit for item, limit in zip(value, most, strict=True)):
            return x, y, z
    raise fields.wrong(key, f"three integers from 1 to {', '.join(map(str, most))}")


def _args(fields: Fields) -> tuple[int, ...]:
    value = fields.data.get("args")
    if not isinstance(value, list) or len(value) > _MOST_ARGS or not all(type(i) is int and i >= 0 for i in value):
        raise fields.wrong("args", f"a list of at most {_MOST_ARGS} integers of 0 or more")
    return tuple(value)


def check_arguments(launch: Launch, count: int, kernel: str) -> None:
    """ArtifactError if a launch wants more than the `count` arguments that `kernel` is called with."""
    if launch.args and max(launch.args) >= count:
        raise ArtifactError(
            f"kernel {kernel}: {launch.symbol} wants argument {max(launch.args)} and the call has {count}; "
            "compile the model again"
        )
