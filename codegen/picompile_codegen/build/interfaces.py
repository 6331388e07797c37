"""The interfaces of kernels as JSON: the part of an artifact's code that declares how it may be called.

A program is data, and may be damaged or made by somebody else; only the code is trusted. So the code declares each
kernel's arguments and their use, and the runtime checks every call of a program against that before it runs.
"""

import json
from collections.abc import Iterable
from typing import Any

from picompile_codegen.cpu.kernel import WrittenKernel
from picompile_codegen.specs import KernelArgument

# The string that every library of kernels exports: the JSON of `interfaces`.
SYMBOL = "pi_kernels"


def interfaces(kernels: Iterable[WrittenKernel]) -> dict[str, Any]:
    """Return the interface of each of `kernels` by name, in the order of their names."""
    named = {kernel.name: kernel for kernel in kernels}
    return {name: _interface(named[name]) for name in sorted(named)}


def interfaces_source(kernels: Iterable[WrittenKernel]) -> str:
    """Return the C source of the string."""
    text = json.dumps(interfaces(kernels), separators=(",", ":"))
    return f'__attribute__((visibility("default"))) const char {SYMBOL}[] = {json.dumps(text)};\n'


def _interface(kernel: WrittenKernel) -> dict[str, Any]:
    bounds = {"tokens": kernel.tokens, "positions": kernel.positions, "slots": kernel.slots}
    return {
        **{name: bound for name, bound in bounds.items() if bound},
        "args": [_argument(argument) for argument in kernel.arguments],
    }


def _argument(argument: KernelArgument) -> dict[str, Any]:
    content: dict[str, Any] = {"name": argument.name, "dtype": argument.dtype, "shape": list(argument.shape)}
    if argument.access != "in":
        content["access"] = argument.access
    if argument.below is not None:
        content["below"] = argument.below
    names = {"copies": argument.copies, "counted": argument.counted}
    return content | {key: name for key, name in names.items() if name is not None}
