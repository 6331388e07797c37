"""Ways in which a description in JSON can be damaged, and the header of a safetensors file, which is one."""

import copy
import json
import math
import random
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Place = tuple[str | int, ...]

# What is never right in place of a number or a text, and what is right in some places.
STRANGE: list[Any] = [
    *(None, True, 0, 1, -1, 10_000, 2**70, 10**400, 0.5, -0.5, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "7", "a\nb", "\x1b[2J", "\ud800", [], [1], [[]], ["x", 3], {}, {"layer": 0}),
]

strange_values = st.sampled_from(STRANGE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(content: Any, place: Place = ()) -> Iterator[Place]:
    """Where there is something in a description, its lists and objects included."""
    if place:
        yield place
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield from places(value, (*place, key))


def replaced(content: Any, place: Place, value: Any) -> Any:
    """A copy with `value` at `place`."""
    damaged = copy.deepcopy(content)
    at_place(damaged, place[:-1])[place[-1]] = value
    return damaged


def without(content: Any, place: Place) -> Any:
    """A copy without what is at `place`."""
    damaged = copy.deepcopy(content)
    del at_place(damaged, place[:-1])[place[-1]]
    return damaged


def at_place(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def spoiled(content: Any, draw: random.Random, but: Container[Place] = ()) -> tuple[Any, str]:
    """A copy with a strange value somewhere, or without something, and what was done; each key gets its turn."""
    by_key: dict[Any, list[Place]] = {}
    for place in places(content):
        if place not in but:
            by_key.setdefault(tuple(key for key in place if isinstance(key, str))[-1:], []).append(place)
    place = draw.choice(by_key[draw.choice(sorted(by_key))])
    where, value = ".".join(map(str, place))[:80], draw.choice(STRANGE)
    if draw.random() < 0.25:
        return without(content, place), f"{where} gone"
    return replaced(content, place, value), f"{where} {repr(value)[:20]}"


def damages(data: st.DataObject, content: Any) -> Iterator[Any]:
    """Copies: without a place that is drawn, with each strange value there, and with any values in up to three."""
    drawn = data.draw(st.sampled_from(list(places(content))))
    yield without(content, drawn)
    yield from (replaced(content, drawn, value) for value in STRANGE)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(content))))
        content = replaced(content, place, data.draw(strange_values))
    yield content


def read_tensors(path: Path) -> tuple[dict[str, Any], bytearray]:
    """Return the header and the data of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])


def tensors_as_bytes(header: Any, data: bytes) -> bytes:
    """Return a safetensors file."""
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data


def damage_header(header: dict[str, Any], data: bytearray, draw: random.Random) -> str:
    """Change what a header says of a tensor, which tensors there are, or how many data; return what was done."""
    one, other = draw.choices(sorted(header.keys() - {"__metadata__"}), k=2)
    shape, (start, end) = header[one]["shape"], header[one]["data_offsets"]
    odd: dict[str, tuple[Any, ...]] = {
        "dtype": ("F64", "I8", "BOOL", "F8_E4M3", "F4", "X", "bf16", "BF16", "F16", "F32", "C64"),
        "shape": ([-1], [2**40, 2**40], [1, *shape], [*shape, 1], shape[::-1], [0], [1.5], ["x"], [2**64]),
        "data_offsets": (
            *([end, start], [start, end + 4], [start + 4, end + 4], [0, 0], [0, 64], [-1, 3], [0], [0, 2**63]),
            header[other]["data_offsets"],
        ),
    }
    kind = draw.choice((*odd, *odd, *odd, "exchange", "name", "gone", "another", "metadata", "more data"))
    if kind in odd:
        header[one][kind] = draw.choice((*odd[kind], *odd[kind], *STRANGE))
    elif kind == "exchange":
        header[one], header[other] = header[other], header[one]
    elif kind == "name":
        names = ("", "x", "a\nb", "\x1b[2J", "model.layers.99.mlp.up_proj.weight", "n" * 10_000)
        header[draw.choice(names)] = header.pop(one)
    elif kind == "gone":
        del header[one]
    elif kind == "another":
        names = ("model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.bias", "x")
        header[draw.choice(names)] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
        data += bytes(16)
    elif kind == "metadata":
        header["__metadata__"] = draw.choice(STRANGE)
    else:
        data += bytes(draw.choice((1, 8, 4096)))
    return f"{kind} of {one}"
