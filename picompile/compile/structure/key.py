"""The key of a structure: everything that it follows from.

That is the outline of the file's header, the options, this compiler's own source files, the packages that it uses and
the C compiler. No structure is kept where anything else may decide.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

from picompile.choices import STORED
from picompile.config import CompileOptions
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.outline import outline_of
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header
from picompile.frontend.model_file import gguf_file
from picompile.machine.targets import find_compiled_targets
from picompile_codegen.build.isa import ISAS
from picompile_codegen.build.object_cache import cache_folder, object_key

# Options that may have any value, and that a structure depends on.
_OPTIONS = (
    *("target", "activation", "activation_bits", "context", "chunk", "sequences", "draft_tokens", "kv_dtype"),
    *("quant", "predictor"),
)
# Options that a structure does not depend on. All others must have their defaults.
_ANY = ("overwrite",)
_PREDICTORS = (None, "none", "exact")
_PACKAGES = ("picompile", "picompile_passes", "picompile_codegen", "picompile_runtime")
_SOURCES = (".py", ".c", ".h", ".cu", ".cuh")
_DISTRIBUTIONS = (
    *("torch", "transformers", "apache-tvm", "apache-tvm-ffi", "gguf", "numpy", "tokenizers", "jinja2"),
    "safetensors",
)
_PLUGINS = "picompile."


@dataclass(frozen=True)
class StructureKey:
    """The key of the structure of a model, and the header that it was made from."""

    key: str
    header: GgufHeader


def structure_key(model: object, options: CompileOptions) -> StructureKey | None:
    """Return the key of the structure of `model` with `options`; None where none is kept.

    Nothing is said of what is wrong with the model or this machine: a compilation without a structure says it.
    """
    if not isinstance(model, str | os.PathLike) or not _applies(options) or cache_folder() is None:
        return None
    try:
        file = gguf_file(Path(model))
        if file is None or _has_plugins():
            return None
        header = read_model_header(file, MOST_MODEL_ELEMENTS)
        isas = [ISAS[name] for target in find_compiled_targets(options.target) for name in target.isas]
        compilers = {isa.machine: _c_compiler(isa.machine) for isa in isas}
        if not all(compilers.values()):
            return None
        given = {name: getattr(options, name) for name in _OPTIONS}
        about = json.dumps([given, repr(isas), compilers])
        return StructureKey(object_key("structure", about, outline_of(header), *compiler_identity()), header)
    except Exception:  # a damaged file, an unknown target
        return None


def _applies(options: CompileOptions) -> bool:
    """Return whether a structure decides everything but weights and tokenizer."""
    if options.quant not in (None, STORED) or options.predictor not in _PREDICTORS:
        return False
    rest = [each.name for each in fields(options) if each.name not in (*_OPTIONS, *_ANY)]
    defaults = CompileOptions()
    return options.back_end is None and all(getattr(options, name) == getattr(defaults, name) for name in rest)


@cache
def _has_plugins() -> bool:
    """Return whether a package adds operators, formats or other things to the compiler."""
    return any(group.startswith(_PLUGINS) for group in entry_points().groups)


def _c_compiler(machine: str) -> list[object] | None:
    """Return what identifies the C compiler for `machine`; None where there is none."""
    name = "gcc" if machine == platform.machine() else f"{machine}-linux-gnu-gcc"
    path = shutil.which(name)
    if path is None:
        return None
    status = os.stat(path)
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns]


@cache
def compiler_identity() -> tuple[str, ...]:
    """Return texts that identify this compiler: its source files, and the packages that it uses."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in _source_files(package):
            content = path.read_bytes()
            digest.update(f"{package} {path.name} {len(content)} ".encode() + content)
    return digest.hexdigest(), sys.version, *(version(name) for name in _DISTRIBUTIONS)


def _source_files(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        for folder, inside, names in os.walk(root):
            inside.sort()
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SOURCES))
