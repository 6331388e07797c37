"""Rotary embeddings as a GGUF file describes them, in the words of a config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.cursor import shown
from picompile.frontend.gguf.header import GgufHeader, at_file
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.values import MetadataValues, shortest

FREQUENCIES = "rope_freqs.weight"
# The tensors of longrope: factors for each frequency, of short and of long texts.
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

# Keys of yarn in the metadata, and in a config.json.
_YARN_KEYS = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# llama.cpp keeps of Llama 3's scaling only its result, a divisor for each frequency; these are the numbers that all
# published models made them from (convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors).
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR = 1.0, 4.0
_ORIGINAL_CONTEXTS = (8192, *(1 << power for power in range(5, 21) if power != 13))
_TOLERANCE = 1e-4


def rope_scaling(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` for a config.json, None for plain rotary embeddings.

    `config` has `rope_theta` and what gives the head size. Raises `UnsupportedModelError` for scalings that cannot be
    told.
    """
    header = values.header
    if found := [name for name in _LONG_FACTORS if name in header.tensors]:
        raise UnsupportedModelError(f"{header.file}: {found[0]}: rotary embeddings of type longrope are not supported")
    if FREQUENCIES in header.tensors:
        return _of_frequencies(header, config)
    kind = read_text(header, values.key("rope.scaling.type"))
    factor = values.positive("rope.scaling.factor") or values.positive("rope.scale_linear")
    if kind in (None, "none") and (factor is None or factor == 1 or kind == "none"):
        return None
    if kind not in (None, "linear", "yarn") or factor is None:
        raise UnsupportedModelError(
            f"{header.file}: rotary embeddings of type {shown(kind or '')} are not supported; supported are linear and "
            "yarn, with a factor"
        )
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    if kind == "yarn":
        original = values.count("rope.scaling.original_context_length")
        scaling |= {"original_max_position_embeddings": original} if original else {}
        found_keys = {ours: values.positive(theirs) for theirs, ours in _YARN_KEYS.items()}
        scaling |= {ours: number for ours, number in found_keys.items() if number is not None}
        # llama.cpp multiplies by it what a config.json has as one number, and by default.
        if (attention := values.positive("rope.scaling.attn_factor")) not in (None, 1.0):
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _of_frequencies(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Llama 3's scaling whose divisors are those of the tensor `rope_freqs.weight`."""
    entry = header.tensors[FREQUENCIES]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if entry.type != "F32" or entry.shape != (head_dim // 2,) or head_dim > 4096:
        raise UnsupportedModelError(
            f"{header.file}: {FREQUENCIES} is {entry.type} {list(entry.shape)}, not F32 [{head_dim // 2}]"
        )

    def read(cursor: Any) -> bytes:
        cursor.skip(entry.offset, FREQUENCIES)
        data: bytes = cursor.take(entry.size_bytes, FREQUENCIES)
        return data

    divisors = memoryview(at_file(header.file, read)).cast("f").tolist()
    if all(divisor == 1 for divisor in divisors):
        return None
    theta, factor = float(config.get("rope_theta", 10000.0)), shortest(max(divisors))
    for original in _ORIGINAL_CONTEXTS:
        if _close(divisors, _llama3_divisors(len(divisors), theta, factor, original)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW_FREQUENCY_FACTOR,
                "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(f"{header.file}: {FREQUENCIES} has factors that are not those of Llama 3's scaling")


def _llama3_divisors(count: int, theta: float, factor: float, original: int) -> list[float]:
    """Return the divisors of `count` frequencies: 1 for short waves, `factor` for long ones, and between them."""
    divisors = []
    for index in range(count):
        turns = original * theta ** (-index / count) / (2 * math.pi)
        share = (turns - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def _close(left: Sequence[float], right: Sequence[float]) -> bool:
    return all(abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(left, right, strict=True))
