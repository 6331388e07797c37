"""GGUF files with random weights in q4_0 for `peers_llama_cuda.py`, as large as those of a model.

This needs numpy alone: it writes the header by GGUF's specification (ggml/docs/gguf.md), version 3. A block of q4_0 is
a float16 scale d and 16 bytes; byte j has weight j in its low half and weight j + 16 in its high half, and a weight is
(nibble - 8) * d.

Every matrix is random: nibbles from 1 to 15, so that their mean is zero, and scales that give weights a deviation of
1 / sqrt(columns), so that products with normalized activations stay about 1. Norms are ones. What adds to the stream
(attn_output, ffn_down) does so with that deviation too: after 80 layers the stream is about 10, which all formats hold.
Drawing 40 GB takes minutes, so some rows are drawn and repeated. The tokenizer knows bytes and made-up words.

`FILE.json` beside it has the shape and the bytes of its parts, from which `bench` computes how many layers fit.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP, GROUP_BYTES = 32, 18
_ALIGNMENT = 32
# ggml's numbers of types of tensors, GGUF's of values, and llama.cpp's of a file that is mostly q4_0.
_F32, _Q4_0 = 0, 2
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_MOSTLY_Q4_0 = 2
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_SPECIALS = ("<unk>", "<s>", "</s>")
# Different weights of a matrix; bytes that are written at once; threads that write, since one gets 2 GB/s into memory.
_DRAWN, _PART_BYTES, _WRITERS = 2**22, 2**26, 8
_VARIANTS = 3
# Of whole numbers from -7 to 7, all equally likely.
_NIBBLE_DEVIATION = (sum(i * i for i in range(-7, 8)) / 15) ** 0.5


class ShapeError(Exception):
    """A shape that no file can be made of."""


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a model of llama's kind that a file needs."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-5
    rope_theta: float = 10000.0
    positions: int = 4096

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn"):
            if getattr(self, name) % GROUP:
                raise ShapeError(f"{self.name}: {name} = {getattr(self, name)} is no multiple of {GROUP}")
        if self.heads * self.head_dim % GROUP or self.heads % self.kv_heads:
            raise ShapeError(f"{self.name}: {self.heads} heads of {self.head_dim} and {self.kv_heads} key heads")
        if self.vocab < len(_SPECIALS) + 256:
            raise ShapeError(f"{self.name}: a vocabulary of {self.vocab} cannot hold all bytes")

    @staticmethod
    def of(name: str, facts: Mapping[str, Any]) -> "LlamaShape":
        """Reads the fields that are known; `head_dim` may be missing."""
        known = {field.name: facts[field.name] for field in fields(LlamaShape) if field.name in facts}
        try:
            known.setdefault("head_dim", facts["hidden"] // facts["heads"])
            return LlamaShape(**{**known, "name": name})
        except (KeyError, TypeError) as error:
            raise ShapeError(f"{name}: the shape lacks {error}") from error

    @property
    def layer_bytes(self) -> int:
        """The matrices of a layer."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return _packed_bytes(self.hidden * (heads + 3 * self.ffn))

    @property
    def head_bytes(self) -> int:
        """The matrix that gives logits; the embedding has as many."""
        return _packed_bytes(self.vocab * self.hidden)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in one layer, f16."""
        return 2 * 2 * self.kv_heads * self.head_dim

    @property
    def dense_bytes(self) -> int:
        """All matrices."""
        return self.layers * self.layer_bytes + 2 * self.head_bytes

    def facts(self) -> dict[str, Any]:
        """Return the facts that are written beside the file."""
        sizes = {key: getattr(self, key) for key in ("layer_bytes", "head_bytes", "cache_bytes", "dense_bytes")}
        return asdict(self) | sizes


def write_gguf(shape: LlamaShape, seed: int, output: Path, before: Callable[[int], object] = lambda size: None) -> int:
    """Writes `output`, which appears whole or not at all, and its facts beside it; returns the file's bytes.

    `before` is called with the bytes of each tensor before they are written.
    """
    tensors = list(_tensors(shape))
    header, starts = _header(shape, tensors)
    whole = len(header) + _aligned(starts[-1] + _bytes(*tensors[-1][1:]))
    unfinished = output.with_name(f"{output.name}.new")
    unfinished.unlink(missing_ok=True)
    if (free := shutil.disk_usage(output.parent).free) < whole:
        raise OSError(f"{output}: needs {whole / 1e9:.1f} GB, and {free / 1e9:.1f} are free there")
    blocks = _Blocks(seed, shape)
    with unfinished.open("wb") as file, ThreadPoolExecutor(_WRITERS) as pool:
        os.pwrite(file.fileno(), header, 0)
        for number, ((_, dimensions, kind), start) in enumerate(zip(tensors, starts, strict=True)):
            size, data = _bytes(dimensions, kind), blocks.of(dimensions, kind, number)
            before(size)
            parts = [(data[: size - at], len(header) + start + at) for at in range(0, size, len(data))]
            written = sum(pool.map(lambda part: os.pwrite(file.fileno(), *part), parts))
            if written != size:
                raise OSError(f"{output}: {written} bytes of {size} were written; the disk is full")
        file.truncate(whole)
    unfinished.replace(output)
    facts_of(output).write_text(json.dumps({**shape.facts(), "seed": seed, "bytes": whole}, indent=1) + "\n")
    return whole


def facts_of(model: Path) -> Path:
    """Return the path of a file's facts."""
    return model.with_name(f"{model.name}.json")


# Name, dimensions with rows first, type.
_Tensor = tuple[str, tuple[int, ...], int]


def _tensors(shape: LlamaShape) -> Iterator[_Tensor]:
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_layer = {
        "attn_norm": (shape.hidden,), "attn_q": (width, shape.hidden), "attn_k": (kv_width, shape.hidden),
        "attn_v": (kv_width, shape.hidden), "attn_output": (shape.hidden, width), "ffn_norm": (shape.hidden,),
        "ffn_gate": (shape.ffn, shape.hidden), "ffn_up": (shape.ffn, shape.hidden),
        "ffn_down": (shape.hidden, shape.ffn),
    }  # fmt: skip
    names: dict[str, tuple[int, ...]] = {"token_embd": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        names |= {f"blk.{layer}.{name}": dimensions for name, dimensions in of_layer.items()}
    names |= {"output_norm": (shape.hidden,), "output": (shape.vocab, shape.hidden)}
    for name, dimensions in names.items():
        yield f"{name}.weight", dimensions, _Q4_0 if len(dimensions) == 2 else _F32


def _packed_bytes(weights: int) -> int:
    return weights // GROUP * GROUP_BYTES


def _bytes(dimensions: Sequence[int], kind: int) -> int:
    count = int(np.prod(dimensions, dtype=np.int64))
    return _packed_bytes(count) if kind == _Q4_0 else 4 * count


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _header(shape: LlamaShape, tensors: Sequence[_Tensor]) -> tuple[bytes, list[int]]:
    """Everything before the data, and where in the data each tensor begins."""
    values = [_string(key) + value for key, value in _values(shape).items()]
    parts, starts, offset = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)), *values], [], 0
    for name, dimensions, kind in tensors:
        # The fastest dimension, columns, comes first.
        sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *reversed(dimensions))
        parts.append(_string(name) + sizes + struct.pack("<IQ", kind, offset))
        starts.append(offset)
        offset += _aligned(_bytes(dimensions, kind))
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0"), starts


def _values(shape: LlamaShape) -> dict[str, bytes]:
    counts = {
        "context_length": shape.positions, "embedding_length": shape.hidden, "block_count": shape.layers,
        "feed_forward_length": shape.ffn, "rope.dimension_count": shape.head_dim, "vocab_size": shape.vocab,
        "attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim,
    }  # fmt: skip
    numbers = {"attention.layer_norm_rms_epsilon": shape.eps, "rope.freq_base": shape.rope_theta}
    words, kinds = _words(shape.vocab)
    return {
        "general.architecture": _text("llama"),
        "general.name": _text(shape.name),
        "general.file_type": _count(_MOSTLY_Q4_0),
        "general.quantization_version": _count(2),
        **{f"llama.{key}": _count(value) for key, value in counts.items()},
        **{f"llama.{key}": struct.pack("<If", _FLOAT32, value) for key, value in numbers.items()},
        "tokenizer.ggml.model": _text("llama"),
        "tokenizer.ggml.pre": _text("default"),
        "tokenizer.ggml.tokens": _array(_STRING, len(words), b"".join(map(_string, words))),
        "tokenizer.ggml.scores": _array(_FLOAT32, len(words), np.zeros(len(words), "<f4").tobytes()),
        "tokenizer.ggml.token_type": _array(_INT32, len(words), np.array(kinds, "<i4").tobytes()),
        "tokenizer.ggml.unknown_token_id": _count(0),
        "tokenizer.ggml.bos_token_id": _count(1),
        "tokenizer.ggml.eos_token_id": _count(2),
        "tokenizer.ggml.add_space_prefix": struct.pack("<I?", _BOOL, False),
    }


def _words(vocab: int) -> tuple[list[str], list[int]]:
    """Specials, bytes and words that no text has, of a SentencePiece vocabulary; and the kind of each."""
    words = [*_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    others = vocab - len(words)
    return words + [f"\u2581w{number}" for number in range(others)], kinds + [_NORMAL] * others


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _text(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(text)


def _count(value: int) -> bytes:
    return struct.pack("<II", _UINT32, value)


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + data


class _Blocks:
    """Bytes of random rows, `_VARIANTS` for each number of columns; all matrices with so many columns share them."""

    def __init__(self, seed: int, shape: LlamaShape) -> None:
        self._seed = seed
        # No matrix is larger than one of these.
        self._part_bytes = min(_PART_BYTES, max(shape.head_bytes, shape.layer_bytes))
        self._made: dict[tuple[int, int], memoryview] = {}

    def of(self, dimensions: Sequence[int], kind: int, number: int) -> memoryview:
        """Bytes that are to be written again and again until tensor `number` is full."""
        if kind == _F32:
            return np.ones(dimensions, np.float32).data.cast("B")
        columns, variant = dimensions[1], number % _VARIANTS
        if (columns, variant) not in self._made:
            rng = np.random.default_rng([self._seed, columns, variant])
            block = random_rows(rng, *dimensions).reshape(-1)
            self._made[columns, variant] = np.tile(block, 1 + self._part_bytes // block.size).data
        return self._made[columns, variant]


def random_rows(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """The rows of a q4_0 matrix that differ, uint8 [rows, row bytes]: an odd number, if it is not all of them."""
    rows = min(rows, max(1, _DRAWN // columns - 1 | 1))
    nibbles = rng.integers(1, 16, (2, rows, columns // GROUP, GROUP // 2), np.uint8)
    scale = np.float16(1 / (_NIBBLE_DEVIATION * columns**0.5))
    packed = np.empty((rows, columns // GROUP, GROUP_BYTES), np.uint8)
    packed[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    packed[..., 2:] = nibbles[0] | nibbles[1] << 4
    return packed.reshape(rows, -1)
