"""Rotary embeddings as a GGUF file describes them, in the words of a config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import GgufHeader, at_file
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.values import MetadataValues, shortest
from picompile.frontend.messages import shown

FREQUENCIES = "rope_freqs.weight"
# The tensors of longrope: factors for each frequency, of short and of long texts.
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

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
_MOST_FREQUENCIES = 2048


def rope_scaling(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` for a config.json, None for plain rotary embeddings.

    `config` has `rope_theta` and what gives the head size. Raises `UnsupportedModelError` for scalings that cannot be
    told.
    """
    header = values.header
    if all(name in header.tensors for name in LONG_FACTORS):
        return _of_long_factors(values, config)
    attention = values.positive("rope.scaling.attn_factor")
    if FREQUENCIES in header.tensors:
        scaling = _of_frequencies(header, config)
    else:
        kind = read_text(header, values.key("rope.scaling.type"))
        factor = values.positive("rope.scaling.factor") or values.positive("rope.scale_linear")
        if kind == "yarn" and factor is not None:
            return _yarn(values, factor, attention or 1.0)
        scaling = _linear(header, kind, factor)
    if attention not in (None, 1.0):
        key = shown(values.key("rope.scaling.attn_factor"))
        raise UnsupportedModelError(f"{header.file}: {key} is {attention}, which only yarn and longrope have")
    return scaling


def _linear(header: GgufHeader, kind: str | None, factor: float | None) -> dict[str, Any] | None:
    if kind in (None, "none") and (factor is None or factor == 1 or kind == "none"):
        return None
    if kind not in (None, "linear") or factor is None:
        raise UnsupportedModelError(
            f"{header.file}: rotary embeddings of type {shown(kind or '')} are not supported; supported are linear and "
            "yarn, with a factor, and longrope, with its tensors"
        )
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(values: MetadataValues, factor: float, attention: float) -> dict[str, Any]:
    """Return yarn's scaling.

    What multiplies cosines and sines is, in llama.cpp at 0c1e57098 (`src/llama-context.cpp`), 0.1 · ln(factor) + 1,
    divided by 0.1 · m · ln(factor) + 1 where `yarn_log_multiplier` is m, and times `attn_factor`.
    """
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = values.count("rope.scaling.original_context_length")
    scaling |= {"original_max_position_embeddings": original} if original else {}
    found_keys = {ours: values.positive(theirs) for theirs, ours in _YARN_KEYS.items()}
    scaling |= {ours: number for ours, number in found_keys.items() if number is not None}
    log = values.positive("rope.scaling.yarn_log_multiplier")
    if values.architecture == "deepseek2" and log is not None:
        # Its converter writes a tenth, and a model of it has the same multiplier twice.
        log = float(f"{10 * log:.6g}")
        return scaling | {"mscale": log, "mscale_all_dim": log}
    if attention == 1.0:
        return scaling | ({} if log is None else {"mscale": 1.0, "mscale_all_dim": log})
    return scaling | {"attention_factor": attention * _magnitude(factor, 1.0) / _magnitude(factor, log or 0.0)}


def _magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _of_long_factors(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return longrope, whose factors for short and for long texts are tensors."""
    header = values.header
    # llama.cpp's own default is the length of the context.
    original = values.count("rope.scaling.original_context_length") or values.count("context_length")
    if not original:
        raise UnsupportedModelError(f"{header.file}: {LONG_FACTORS[0]}: longrope needs {values.key('context_length')}")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = values.count("rope.dimension_count") or head_dim
    long, short = (_vector(header, name, rotary // 2) for name in LONG_FACTORS)
    return {
        "rope_type": "longrope",
        "long_factor": [shortest(number) for number in long],
        "short_factor": [shortest(number) for number in short],
        "original_max_position_embeddings": original,
        "attention_factor": values.positive("rope.scaling.attn_factor") or 1.0,
    }


def _vector(header: GgufHeader, name: str, size: int) -> list[float]:
    """Return the `size` numbers of a tensor F32."""
    entry = header.tensors[name]
    if entry.type != "F32" or entry.shape != (size,) or size > _MOST_FREQUENCIES:
        raise UnsupportedModelError(f"{header.file}: {name} is {entry.type} {list(entry.shape)}, not F32 [{size}]")

    def read(cursor: Any) -> bytes:
        cursor.skip(entry.offset, name)
        data: bytes = cursor.take(entry.size_bytes, name)
        return data

    return [float(number) for number in memoryview(at_file(entry.file, read)).cast("f")]


def _of_frequencies(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Llama 3's scaling whose divisors are those of the tensor `rope_freqs.weight`."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    divisors = _vector(header, FREQUENCIES, head_dim // 2)
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
