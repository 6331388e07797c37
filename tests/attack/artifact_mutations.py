"""Ways to damage an artifact: the content of its JSON, calls of its program, and its weights."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import damage_file
from helpers.damage import Place, at_place, damage_header, places, read_tensors, spoiled, tensors_as_bytes
from picompile_runtime.artifact.manifest import sealed

Json = dict[str, Any]

CODE = ".so"
# Code is what is trusted: with a hash of its own it may do anything, so only its old hash is held against it.
_JSON = ("program.json", "report.json", "tokenizer.json", "tokenizer_config.json")


def copy_artifact(source: Path, target: Path) -> None:
    """Copy by links: a mutation writes its own file in the place of one."""
    shutil.copytree(source, target, copy_function=os.link)


def write(path: Path, content: bytes) -> None:
    """Put `content` in the place of a file, which may be a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def seal(folder: Path) -> None:
    """Let the manifest have the hashes and sizes that the files have now."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return
    for name, entry in manifest["files"].items():
        file = folder / name
        if isinstance(entry, dict) and name and "\0" not in name and len(name) < 200 and file.is_file():
            entry |= {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    write(path, sealed(manifest))


def damage_content(folder: Path, random: Random) -> str:
    """Change what a file says, and give it the hash that it then has."""
    choices = ((_program, 12), (_sizes, 5), (_strange, 8), (_weights, 4), (_text, 2))
    mutate = random.choices([each for each, _ in choices], [weight for _, weight in choices])[0]
    told = [mutate(folder, random)]
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        with suppress(ValueError, KeyError, TypeError, IndexError):  # where there is nothing left to change
            told.append(mutate(folder, random))
    if not told[-1].startswith("manifest"):
        with suppress(ValueError):
            seal(folder)
    return ", ".join(told)


@contextmanager
def edited(folder: Path, name: str) -> Iterator[Any]:
    """The content of a file of JSON, which is written back."""
    content = json.loads((folder / name).read_bytes())
    yield content
    write(folder / name, json.dumps(content).encode(errors="surrogatepass"))


def _program(folder: Path, random: Random) -> str:
    """A part of the program in the place of another of its kind, once more or gone, or another number."""
    with edited(folder, "program.json") as program:
        kinds: dict[Place, list[Place]] = {}
        for place in places(program):
            kind = tuple("*" if at == 1 or isinstance(key, int) else key for at, key in enumerate(place))
            kinds.setdefault(kind, []).append(place)
        calls, args = ("functions", "*", "*"), ("functions", "*", "*", "args", "*")
        others = sorted(kind for kind in kinds if len(kinds[kind]) > 1)
        kind = random.choice((calls, args, args, random.choice(others), random.choice(others)))
        one, other = random.choice(kinds[kind]), random.choice(kinds[kind])
        if kind == args and random.random() < 0.3:  # a kernel would write to it
            other = random.choice([place for place in kinds[args] if "weight" in at_place(program, place)])
        (holder, key), (source, at) = ((at_place(program, place[:-1]), place[-1]) for place in (one, other))
        now, new = holder[key], copy.deepcopy(source[at])
        ways = ("copy", "exchange", "exchange", "gone", "once more", "number")
        what = random.choice(ways[:3] if kind == args and random.random() < 0.8 else ways)
        if what == "number" and type(now) is int:
            holder[key] = random.choice((0, 1, 4, 64, 4096, now + 64, max(0, now - 64), now // 2, now * 1000, 2**47))
        elif what == "gone":
            del holder[key]
        elif what == "once more" and isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), new)
        else:
            if kind == args and random.random() < 0.5:  # seen as what it replaces
                tensors = program["buffers"] | program["state"]
                view = tensors.get(now.get("buffer") or now.get("state"), {}) | now
                if "grows" in view:  # the state of one sequence
                    view["shape"] = now.get("shape", [program["sequences"], *view["shape"]])
                new |= {name: view[name] for name in ("dtype", "shape") if name in view}
            if what == "exchange":
                source[at] = now
            holder[key] = new
        return f"program: {what}, {'.'.join(map(str, one))} and {'.'.join(map(str, other))}"


def _sizes(folder: Path, random: Random) -> str:
    """Sizes that manifest and program agree on, or do not."""
    key = random.choice(("context", "chunk", "sequences", "vocab", "layers", "arena_bytes", "shared_arena_bytes"))
    factor = random.choice((0.5, 2, 3, 1000, 2**20))
    with edited(folder, "program.json") as program:
        value = max(1, int(program[key] * factor)) if random.random() < 0.7 else random.choice((1, 2, 3, 7, 2**31 - 1))
        before, program[key] = program[key], value
        if random.random() < 0.5:  # with everything that is as large
            for tensor in (*program["buffers"].values(), *program["state"].values()):
                tensor["shape"] = [value if size == before else size for size in tensor["shape"]]
    if random.random() < 0.8:
        with edited(folder, "manifest.json") as manifest:
            manifest[key] = value
    return f"sizes: {key} is {value}"


def _strange(folder: Path, random: Random) -> str:
    """A strange value, or none, anywhere in a file of JSON; a manifest gets its own hash."""
    name = random.choice([each for each in (*_JSON, *_JSON, "manifest.json") if (folder / each).exists()])
    content, told = spoiled(json.loads((folder / name).read_bytes()), random, but=(("sha256",),))
    write(folder / name, sealed(content) if name == "manifest.json" else json.dumps(content).encode())
    return f"{name}: {told}"


def _text(folder: Path, random: Random) -> str:
    """Text that is no JSON, or is in another way."""
    others = (CODE, "manifest.json", "safetensors")
    name = random.choice([each for each in files_of(folder) if not each.endswith(others)])
    if random.random() < 0.5:
        return damage_file(folder / name, [folder / each for each in files_of(folder)], random)
    text = (folder / name).read_bytes()
    twice = text.replace(b'"shape"', b'"shape": [1], "shape"', 1)
    write(folder / name, random.choice((b"[" * 100_000, twice, text.replace(b"64", b"9" * 5000, 1))))
    return f"text of {name}"


def _weights(folder: Path, random: Random) -> str:
    """Another header, or data of any value."""
    path = folder / "weights.safetensors"
    header, data = read_tensors(path)
    if random.random() < 0.5:
        told = damage_header(header, data, random)
    else:
        names = sorted(name for name in header if name != "__metadata__")
        tables = [name for name in names if "numbers" in name or "neurons" in name or "part" in name]
        told = random.choice(tables if tables and random.random() < 0.5 else names)
        begin, end = header[told]["data_offsets"]
        at = random.randrange(begin, end)
        size = min(end - at, random.choice((1, 4, 4096)))
        data[at : at + size] = random.choice((b"\xff", b"\x7f", b"\0", random.randbytes(1))) * size
    write(path, tensors_as_bytes(header, data))
    return f"weights: {told}"
