"""Ways to damage an artifact: the content of its JSON, calls of its program, and its weights."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.damage import STRANGE, places, replaced, without
from picompile_runtime.artifact.manifest import sealed

Json = dict[str, Any]

CODE = ".so"
# Code is what is trusted: with a hash of its own it may do anything, so only its old hash is held against it.
_JSON = ("program.json", "report.json", "tokenizer.json", "tokenizer_config.json")
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "float32")


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
    choices = ((_calls, 12), (_sizes, 5), (_strange, 5), (_weights, 4), (_text, 2), (_manifest, 3))
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


def _calls(folder: Path, random: Random) -> str:
    with edited(folder, "program.json") as program:
        return f"program: {random.choice(_CALL_CHANGES)(program, random)}"


def _some_call(program: Json, random: Random) -> tuple[list[Json], int]:
    calls = program["functions"][random.choice([name for name, each in program["functions"].items() if each])]
    return calls, random.randrange(len(calls))


def _weights_of(program: Json) -> list[str]:
    args = (arg for calls in program["functions"].values() for call in calls for arg in call["args"])
    return [arg["weight"] for arg in args if "weight" in arg]


def _swap_functions(program: Json, random: Random) -> str:
    one, other = random.sample(sorted(program["functions"]), 2)
    functions, logits = program["functions"], program["logits"]
    functions[one], functions[other] = functions[other], functions[one]
    if random.random() < 0.5 and one in logits and other in logits:
        logits[one], logits[other] = logits[other], logits[one]
    return f"{one} and {other} exchanged"


def _change_argument(program: Json, random: Random) -> str:
    (calls, at), (others, from_) = _some_call(program, random), _some_call(program, random)
    args, weights = calls[at]["args"], _weights_of(program)
    place, other = random.randrange(len(args)), random.randrange(len(args))
    given = args[place]
    kind = random.choice(("swap", "swap", "foreign", "foreign", "weight", "offset", "shape", "dtype"))
    if kind == "swap":
        args[place], args[other] = args[other], args[place]
    elif kind == "foreign":
        args[place] = copy.deepcopy(random.choice(others[from_]["args"]))
        if random.random() < 0.5:  # of the same view
            args[place] |= {key: given[key] for key in ("dtype", "shape") if key in given}
    elif kind == "weight" and weights and (name := given.get("buffer") or given.get("state")):
        # Where a buffer of the same size is: the kernel would write to it.
        tensor = program["buffers"].get(name) or program["state"][name]
        view = {key: given.get(key, tensor[key]) for key in ("dtype", "shape")}
        args[place] = {"weight": random.choice(weights), **view}
    elif kind == "offset":
        given["offset"] = random.choice((0, 4, 16, 64, 128, 4096))
    elif kind == "dtype":
        given["dtype"] = random.choice(_DTYPES)
    elif kind == "shape":
        given["shape"] = _another_shape(given.get("shape") or [random.choice((1, 3, 16, 64, 96, 300))], random)
    return f"{kind} of argument {place} of {calls[at]['kernel']}: {json.dumps(args[place])}"


def _change_call(program: Json, random: Random) -> str:
    (calls, at), (others, from_) = _some_call(program, random), _some_call(program, random)
    call, foreign = calls[at], others[from_]
    kind = random.choice(("kernel", "drop", "double", "move", "swap", "foreign", "device", "op", "number"))
    if kind == "kernel":
        call["kernel"] = foreign["kernel"]
    elif kind == "drop":
        del calls[at]
    elif kind == "double":
        calls.insert(random.randrange(len(calls) + 1), copy.deepcopy(call))
    elif kind == "move":
        calls.insert(random.randrange(len(calls)), calls.pop(at))
    elif kind == "swap":
        other = random.randrange(len(calls))
        calls[at], calls[other] = calls[other], calls[at]
    elif kind == "foreign":
        calls.insert(at, copy.deepcopy(foreign))
    elif kind == "device":
        call["device"] = "host" if call.get("device") == "device" else "device"
    elif kind == "op":
        call["op"] = random.choice(("wait", "receive", "send", "ffn", "head", "x"))
    else:
        call[random.choice(("layer", "window", "weight_bytes"))] = random.choice((0, 1, 7, 2**31, 2**47))
    return f"{kind} of call {at}, {call['kernel']}"


def _another_shape(shape: Sequence[int], random: Random) -> list[int]:
    found = list(shape)
    change = random.choice(("grow", "shrink", "swap", "longer", "shorter"))
    at = random.randrange(len(found))
    if change == "grow":
        found[at] *= random.choice((2, 3, 1000))
    elif change == "shrink":
        found[at] = max(1, found[at] // 2)
    elif change == "swap":
        found.reverse()
    elif change == "longer":
        found.insert(at, 1)
    elif len(found) > 1:
        found[at - 1 : at + 1] = [found[at - 1] * found[at]] if at else [found[0]]
    return found


def _change_buffer(program: Json, random: Random) -> str:
    kind = random.choice(("buffers", "buffers", "buffers", "state"))
    name = random.choice(sorted(program[kind]))
    tensor = program[kind][name]
    change = random.choice(("offset", "offset", "offset", "shape", "dtype", "memory", "gone", "exchange"))
    if change == "offset" and kind == "buffers":
        others = [each["offset"] for each in program["buffers"].values()]
        tensor["offset"] = random.choice((random.choice(others), tensor["offset"] + 64, max(0, tensor["offset"] - 64)))
    elif change == "shape":
        tensor["shape"] = _another_shape(tensor["shape"], random)
    elif change == "dtype":
        tensor["dtype"] = random.choice(_DTYPES)
    elif change == "memory":
        tensor["memory"] = random.choice(("host", "device", "shared"))
    elif change == "gone":
        del program[kind][name]
    else:
        other = random.choice(sorted(program[kind]))
        program[kind][name], program[kind][other] = program[kind][other], tensor
    return f"{change} of {kind} {name}"


def _change_tables(program: Json, random: Random) -> str:
    kind = random.choice(("logits", "ffn", "streamed", "leading"))
    if kind == "logits":
        function = random.choice(sorted(program["logits"]))
        program["logits"][function] = random.choice([*program["logits"].values(), *list(program["buffers"])[:20]])
    elif kind == "ffn" and program["ffn"]:
        part = random.choice(program["ffn"])
        part[random.choice(("layer", "stats_row", "neurons"))] = random.choice((0, 1, 5, 100, 2**40))
    elif kind == "streamed":
        weights = _weights_of(program)
        program["streamed"] = random.sample(weights, min(3, len(weights)))
    else:
        names = sorted(program["buffers"])
        program["leading"] = {"decode": {"scores": random.choice(names), "ids": random.choice(names)}}
    return f"{kind} changed"


_CALL_CHANGES = (
    *(_swap_functions, *[_change_argument] * 6, *[_change_call] * 5, _change_buffer, _change_buffer, _change_tables),
)


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
    """A strange value, or none, anywhere in a file of JSON."""
    name = random.choice([each for each in _JSON if (folder / each).exists()])
    content = json.loads((folder / name).read_bytes())
    # The tables are long: each key gets its turn.
    by_key: dict[Any, list[Any]] = {}
    for place in places(content):
        by_key.setdefault(tuple(key for key in place if isinstance(key, str))[-1:], []).append(place)
    place = random.choice(by_key[random.choice(sorted(by_key))])
    content, told = _spoiled(content, place, random)
    write(folder / name, json.dumps(content).encode(errors="surrogatepass"))
    return f"{name}: {told}"


def _manifest(folder: Path, random: Random) -> str:
    """A strange value anywhere in the manifest, which gets its own hash."""
    content = json.loads((folder / "manifest.json").read_bytes())
    place = random.choice([place for place in places(content) if place != ("sha256",)])
    content, told = _spoiled(content, place, random)
    write(folder / "manifest.json", sealed(content))
    return f"manifest: {told}"


def _spoiled(content: Any, place: Any, random: Random) -> tuple[Any, str]:
    where, value = ".".join(map(str, place))[:80], random.choice(STRANGE)
    if random.random() < 0.25:
        return without(content, place), f"{where} gone"
    return replaced(content, place, value), f"{where} {repr(value)[:20]}"


def _text(folder: Path, random: Random) -> str:
    """Text that is no JSON, or is in another way."""
    others = (CODE, "manifest.json", "safetensors")
    name = random.choice([each for each in files_of(folder) if not each.endswith(others)])
    text = (folder / name).read_bytes()
    at = random.randrange(len(text)) if text else 0
    kind = random.choice(("cut", "flip", "deep", "twice", "digits"))
    changed = {
        "cut": text[:at],
        "flip": text[:at] + bytes([text[at] ^ (1 << random.randrange(8))]) + text[at + 1 :] if text else b"",
        "deep": b"[" * 100_000,
        "twice": text.replace(b'"shape"', b'"shape": [1], "shape"', 1),
        "digits": text.replace(b"64", b"9" * 5000, 1),
    }[kind]
    write(folder / name, changed)
    return f"text: {kind} {name}"


def weights_of(path: Path) -> tuple[Json, bytearray]:
    """Return header and data of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])


def _weights(folder: Path, random: Random) -> str:
    """Headers with exchanged or strange entries, and data of any value."""
    path = folder / "weights.safetensors"
    header, data = weights_of(path)
    before = len(data)
    names = sorted(name for name in header if name != "__metadata__")
    kind = random.choice(("exchange", "offsets", "strange", "gone", "data", "data", "data", "floats", "length"))
    one, other = random.sample(names, 2)
    if kind == "exchange":
        header[one], header[other] = header[other], header[one]
    elif kind == "offsets":
        header[one]["data_offsets"] = random.choice((header[other]["data_offsets"], [0, 64], [64, 0], [0, 2**60]))
    elif kind == "strange":
        header[one][random.choice(("dtype", "shape", "data_offsets"))] = random.choice(STRANGE)
    elif kind == "gone":
        del header[one]
    elif kind in ("data", "floats"):
        tables = [name for name in names if "numbers" in name or "neurons" in name or "part" in name]
        begin, end = header[random.choice(tables or names) if random.random() < 0.5 else one]["data_offsets"]
        fill = random.choice((b"\xff", b"\x7f", b"\0", random.randbytes(1)))
        at = random.randrange(begin, end)
        data[at : min(end, at + random.choice((1, 4, 4096)))] = fill * (min(end, at + 4096) - at)
        del data[before:]
    text = json.dumps(header).encode(errors="surrogatepass")
    text += b" " * (-(8 + len(text)) % 64)
    length = len(text) if kind != "length" else random.choice((0, 7, len(text) + 64, 2**40, 2**63))
    write(path, length.to_bytes(8, "little") + text + bytes(data))
    return f"weights: {kind} {one}"
