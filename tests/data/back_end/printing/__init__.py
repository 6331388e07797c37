"""A back end that prints its kernels instead of compiling them: a package as somebody else would write it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile_codegen.backend import BackEnd, CodeTarget
from picompile_codegen.build.interfaces import interfaces
from picompile_codegen.specs import KernelSpec


def begin(spec: KernelSpec) -> Any:
    from picompile_codegen.cpu.kernel import KernelFunction

    return KernelFunction(spec)


def build(kernels: Mapping[KernelSpec, Any], folder: Path, target: CodeTarget) -> dict[str, Any]:
    (folder / "printed.txt").write_text("\n".join(kernel.prim_func.script() for kernel in kernels.values()))
    (folder / "printed.json").write_text(json.dumps(interfaces(kernels.values())))
    return {"text": "kernels/printed.txt", "interfaces": "kernels/printed.json"}


# The bodies are the CPU's.
BACK_END = BackEnd("printing", "picompile_codegen.cpu", begin, build)
