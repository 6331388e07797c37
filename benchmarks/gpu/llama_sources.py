"""Sources of llama.cpp for `peers_llama_cuda.py`: what two programs and two backends need of llama-cpp-python's sdist.

PyPI's source distribution of llama-cpp-python has llama.cpp in `vendor/llama.cpp`, and its change log names the commit.
Of it stay ggml with the backends for CPUs (x86) and CUDA, the library, the common utilities, and the two tools.
"""

import fnmatch
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_VENDORED = "vendor/llama.cpp/"
# The folder in the archive that `trim` writes.
TOP = "llama.cpp"
FACTS = "source.json"
TOOLS = ("llama-bench", "completion")

# By the first pattern that fits: `*` goes over folders as well. What fits none stays out.
_RULES = (
    (False, "*.md"),
    (False, "*.py"),
    (True, "CMakeLists.txt"),
    (True, "LICENSE"),
    (True, "cmake/*"),
    (True, "include/*"),
    (True, "src/*"),
    (True, "common/*"),
    *((True, f"tools/{name}/*") for name in TOOLS),
    (False, "vendor/miniaudio/miniaudio.h"),
    (False, "vendor/stb/stb_image.h"),
    (True, "vendor/*"),
    (True, "ggml/CMakeLists.txt"),
    (True, "ggml/*.in"),
    (True, "ggml/cmake/*"),
    (True, "ggml/include/*"),
    (True, "ggml/src/ggml-cpu/arch/x86/*"),
    (False, "ggml/src/ggml-cpu/arch/*"),
    (False, "ggml/src/ggml-cpu/kleidiai/*"),
    (False, "ggml/src/ggml-cpu/spacemit/*"),
    (True, "ggml/src/ggml-cpu/*"),
    (True, "ggml/src/ggml-cuda/*"),
    (False, "ggml/src/*/*"),
    (True, "ggml/src/*"),
)
_OUR_TOOLS = "find_package(Threads REQUIRED)\nllama_add_compile_flags()\n" + "".join(
    f"add_subdirectory({name})\n" for name in TOOLS
)
# Of the builds of the CPU backend, of which the best for a machine is loaded: all x86 with AVX2 can run the first.
VARIANTS = ("haswell", "icelake", "zen4", "sapphirerapids")
_LISTED, _VARIANT = (
    "ggml/src/CMakeLists.txt",
    re.compile(rb"^ *ggml_add_cpu_backend_variant\((\w+)[ )].*\n", re.MULTILINE),
)
_COMMIT = re.compile(r"ggml-org/llama\.cpp@([0-9a-f]+)")


class SourceError(Exception):
    """An archive that is not what `trim` takes."""


def trim(sdist: Path, output: Path) -> dict[str, object]:
    """Writes the sources that are needed to `output`, a .tar.xz that appears whole or not at all.

    Returns the commit, and the number and bytes of the files.
    """
    unfinished = output.with_name(f"{output.name}.new")
    with tarfile.open(sdist) as archive:
        files = dict(_wanted(archive))
        commit = _commit(archive)
    if _LISTED not in files or commit is None:
        raise SourceError(f"{sdist}: is no source distribution of llama-cpp-python; pip download --no-binary gives it")
    facts = {"commit": commit, "from": sdist.name, "files": len(files), "bytes": sum(map(len, files.values()))}
    files["tools/CMakeLists.txt"] = _OUR_TOOLS.encode()
    files[_LISTED] = _VARIANT.sub(lambda found: found[0] if found[1].decode() in VARIANTS else b"", files[_LISTED])
    files[FACTS] = (json.dumps(facts) + "\n").encode()
    with tarfile.open(unfinished, "w:xz", preset=9) as trimmed:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size = len(data)
            trimmed.addfile(entry, io.BytesIO(data))
    unfinished.replace(output)
    return facts


def is_wanted(name: str) -> bool:
    """Whether a file of llama.cpp is needed; `name` begins at its top folder."""
    return next((keep for keep, pattern in _RULES if fnmatch.fnmatchcase(name, pattern)), False)


def _wanted(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = member.name.partition("/")[2]
        if member.isfile() and name.startswith(_VENDORED) and is_wanted(name.removeprefix(_VENDORED)):
            yield name.removeprefix(_VENDORED), _read(archive, member)


def _commit(archive: tarfile.TarFile) -> str | None:
    """The newest commit that the change log names."""
    for member in archive.getmembers():
        if len(PurePosixPath(member.name).parts) == 2 and member.name.endswith("/CHANGELOG.md"):
            found = _COMMIT.search(_read(archive, member).decode(errors="replace"))
            return found[1] if found else None
    return None


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    return opened.read() if opened else b""
