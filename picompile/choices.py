"""The choices that compiling and planning share, with their limits and defaults."""

import re
from typing import TypeGuard

from picompile.errors import UsageError
from picompile.options import Option, one_of
from picompile.quantities import shortened
from picompile_passes.formats import CACHE_FORMATS, FORMATS

# The built-in formats of matrices; packages may offer more, which `FORMATS` has as well.
QUANTIZATIONS = tuple(name for name in FORMATS.builtin if FORMATS[name].rows)
FORMATS_HELP = "Weight format: " + ", ".join(f"{name} ({FORMATS[name].summary})" for name in QUANTIZATIONS)
# Fewer tokens say nothing about neurons that fire on one token in a hundred.
LEAST_CALIBRATION_TOKENS = 1024
PREDICTORS = ("exact", "learned", "sign", "none")
# Predictors that are trained, or whose threshold is searched, on text.
TRAINED = ("learned", "sign")
# Element types of the key/value cache, and what the code generator calls them.
KV_DTYPES = {"f16": "float16", "f32": "float32"} | {name: name for name in CACHE_FORMATS}
DEFAULT_CONTEXT = 4096
# Tokens of a prompt that are read together: weights are unpacked once for all of them. More would gain a few percent,
# but whoever stops a prompt, or waits for another answer, would wait longer.
CHUNK = 128
# With a GPU: what a chunk costs over the bus does not grow with its tokens.
GPU_CHUNK = 512
# No model has so many layers; files and pictures of layers beyond it are neither looked for nor drawn.
MOST_LAYERS = 10_000

CONTEXT = Option(
    f"Longest sequence, in tokens. Default: the model's own limit, at most {DEFAULT_CONTEXT}.",
    metavar="N",
    least=1,
    common=True,
)
KV_DTYPE = Option("Element type of the KV cache. Default: f16, but f32 for FATReLU models.", choices=tuple(KV_DTYPES))
CHUNK_OPTION = Option(
    f"Tokens of a prompt that are read together. Default: {CHUNK}, or {GPU_CHUNK} with a GPU, to which the host's "
    "weights are copied once for each chunk.",
    metavar="N",
    least=2,
    aliases=("--prefill-chunk",),
)


def default_chunk(context: int, *, on_gpu: bool) -> int:
    """Return how many tokens of a prompt are read together by default; a context of `context` tokens has no more."""
    return max(2, min(GPU_CHUNK if on_gpu else CHUNK, context))


def finer_cache(kv_dtype: str) -> str:
    """Return the key of `KV_DTYPES` that rounds less than `kv_dtype`, which is not f32."""
    finest_first = ("f32", "f16", *CACHE_FORMATS)
    return finest_first[finest_first.index(kv_dtype) - 1]


def has_spread_cache(kv_dtype: str | None) -> TypeGuard[str]:
    """Return whether a cache of this type holds each group turned, as `Codec.spread_cache` says."""
    return kv_dtype is not None and kv_dtype in CACHE_FORMATS and FORMATS[kv_dtype].spread_cache


def default_kv_dtype(activation: str) -> str:
    """Return the key of `KV_DTYPES` for a model with `activation` (the dialect's text): f32 for FATReLU, else f16.

    FATReLU jumps at its threshold: what a float16 cache rounds off moves neurons across and changes the logits.
    """
    return "f32" if activation.startswith("fatrelu") else "f16"


# The numbers that a quantized checkpoint has, in a format that has the same for each matrix.
STORED = "stored"
# A format of 4 bits or somewhat more for each matrix, without a text.
FOUR_BITS = "4bit"
# 4bit chooses from these, which kernels read in panels; they are sorted by their bits.
CANDIDATES = ("q4_k", "q4_1", "q5", "q5_k", "q6_k", "q8")
# What a checkpoint that is not quantized is rounded to, unless the user asks for something else.
DEFAULT_QUANT = FOUR_BITS
# The short help shows this text for --quant.
SHORT_QUANT = f"Weight format, such as 4bit, q8 or f16. Default: {DEFAULT_QUANT}, or {STORED} if MODEL is quantized."

# A budget of bits a weight, for which each matrix gets a format of its own; `auto` takes as few as keep the model's
# predictions.
AUTO_BITS = "auto"
_BITS = re.compile(r"(\d{1,2}(?:\.\d{1,4})?)bpw")
# The formats that a budget chooses from, the coarsest first.
BUDGET_FORMATS = tuple(sorted((n for n in QUANTIZATIONS if FORMATS[n].budget), key=lambda n: FORMATS[n].bits))
_LEAST_BITS, _MOST_BITS = FORMATS[BUDGET_FORMATS[0]].bits, FORMATS[BUDGET_FORMATS[-1]].bits


def parse_bits(quant: str) -> float | None:
    """Return the budget that a text like `4.6bpw` names, in bits a weight; None for every other text.

    Raises `UsageError` for a budget that no choice of formats keeps to or uses up.
    """
    found = _BITS.fullmatch(quant)
    if found is None:
        return None
    if not _LEAST_BITS <= float(found[1]) <= _MOST_BITS:
        raise UsageError(f"{quant}: matrices take from {_LEAST_BITS} to {_MOST_BITS} bits a weight, with their scales")
    return float(found[1])


def is_budget(quant: str) -> bool:
    """Return whether each matrix gets a format of its own, by a budget or by what it loses."""
    return quant == AUTO_BITS or parse_bits(quant) is not None


def row_formats() -> list[str]:
    """Return the formats whose rows kernels can read: ours, and those of packages, which this loads."""
    return [name for name in FORMATS if FORMATS[name].rows]


def has_rows(name: str) -> bool:
    """Return whether `name` is a format whose rows kernels can read."""
    return name in FORMATS and FORMATS[name].rows


def check_format(quant: str) -> None:
    """Raise `UsageError` unless `quant` is a format whose rows kernels can read."""
    if not has_rows(quant):
        raise UsageError(f"unknown quantization {quant!r}; known are {', '.join(row_formats())}")


def check_predictor_quant(quant: str) -> None:
    """Raise `UsageError` unless `quant` is a format whose rows kernels can read, or `auto`."""
    if quant != "auto" and not has_rows(quant):
        raise UsageError(f"unknown quantization {quant!r} of predictors; known are auto, {', '.join(row_formats())}")


PREDICTOR_QUANT = Option(
    f"Weight format of predictors: auto, {one_of(QUANTIZATIONS)}. auto: that of the model, but q6 where it has 4 bits. "
    "Fewer bits make smaller predictors, which name other neurons: the accuracy check says what that costs.",
    metavar="FORMAT",
    check=check_predictor_quant,
)


def check_quant(quant: str) -> None:
    """Raise `UsageError` unless `quant` is a format whose rows kernels can read, `stored`, a budget, or `auto`."""
    if quant in FORMATS and not FORMATS[quant].rows:
        raise UsageError(
            f"{quant} is a format of quantized checkpoints alone, which keep it with --quant {STORED}"
            f"{_near_hint(quant)}"
        )
    if quant not in FORMATS and quant not in (STORED, FOUR_BITS) and not is_budget(quant):
        known = ", ".join((FOUR_BITS, *row_formats(), STORED))
        raise UsageError(
            f"unknown quantization {shortened(repr(quant))}; known are {known}, auto, and budgets like 5.2bpw"
            f"{_near_hint(quant)}"
        )


def _near_hint(quant: str) -> str:
    """Return the end of a message that names the format nearest to a name of GGUF files; '' for other names."""
    near = nearest_format(quant)
    return "" if near is None else f"; {near} is nearest to {quant}"


# The size of a K quantization, which ends a file's name behind the type of most of its tensors: Q4_K_M.
_GGUF_MIX = re.compile(r"_(?:XS|S|M|L|XL)$")


def nearest_format(name: str) -> str | None:
    """Return the value of --quant whose bits are nearest to those of a GGUF format such as `Q4_K_M`, in any case.

    Of two that are as near it is the one of more bits. A format that has the same numbers, or the same name in small
    letters, is nearest. None if GGML has no such type.
    """
    types = {ggml: FORMATS[each] for each in FORMATS.builtin for ggml in FORMATS[each].ggml}
    if has_rows(name.lower()):
        return name.lower()
    of_file = name.upper()
    codec = types.get(of_file) or types.get(_GGUF_MIX.sub("", of_file))
    if codec is None:
        return None
    if codec.rows:
        return codec.name
    near = min(reversed(BUDGET_FORMATS), key=lambda each: abs(FORMATS[each].bits - codec.bits))
    return FOUR_BITS if near == base_format(FOUR_BITS) else near


def is_calibrated(quant: str) -> bool:
    """Return whether weights are rounded so coarsely that calibration is worth its time."""
    return is_budget(quant) or quant == FOUR_BITS or (quant != STORED and FORMATS[quant].calibrated)


def base_format(quant: str) -> str:
    """Return the format of matrices that are given none of their own: q6 where `quant` is a budget, else `quant`.

    In a checkpoint whose quantized matrices keep their numbers, all others are plain, and become float16. q4m is the
    best format of 4 bits whose rows kernels can read.
    """
    if quant in (STORED, FOUR_BITS):
        return "f16" if quant == STORED else "q4m"
    return "q6" if is_budget(quant) else quant


def planned_format(quant: str) -> str:
    """Return what a plan calls the weights of a model in `quant`: `stored`, or the format `base_format`."""
    return quant if quant == STORED else base_format(quant)


def planned_title(quant: str | None, planned: str) -> str:
    """Return what a user calls the weights of a plan: `quant` is the value of --quant, `planned` the plan's format."""
    if quant is None:
        quant = DEFAULT_QUANT
    if is_budget(quant):
        return f"{quant} (planned as {planned})"
    return FOUR_BITS if quant == FOUR_BITS and planned == base_format(FOUR_BITS) else planned


def default_predictor(activation: str) -> str:
    """Return the lossless predictor for `activation` (the dialect's text): `exact` if neurons can be silent."""
    from picompile_passes.dialect.activations import parse_activation

    return "exact" if parse_activation(activation).sparse else "none"


def resolve_context(context: int | None, positions: int | None) -> int:
    """Return `context`, or its default: the model's `positions` (None: no limit), at most `DEFAULT_CONTEXT` tokens.

    Raises:
        UsageError: `context` is more than the model's positions.
    """
    if context is None:
        return min(positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if positions and context > positions:
        raise UsageError(f"a context of {context} tokens is more than the model's {positions} positions")
    return context
