"""The kernels of `benchmarks.gpu.pack`: small ones of every kind, with odd sizes, and those whose speed is asked for.

A case is a builder of `picompile_codegen.cuda` with its parameters. What it is given, what eager PyTorch makes of the
same, and which bytes it moves, `benchmarks.gpu` finds from the builder's name and the parameters alone.
"""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from picompile.choices import QUANTIZATIONS
from picompile_codegen import cuda, specs
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.signs import sign_row_bytes
from picompile_codegen.specs import (
    CopyWordsSpec,
    CountedFfnSpec,
    CountedSendMaskSpec,
    KernelArgument,
    KernelSpec,
    LinearAddSpec,
    LinearSpec,
    PingPongSpec,
    RmsNormSpec,
    SumNormSpec,
)
from picompile_passes.formats import FORMATS


def _linear_add(eps: float, **linear: Any) -> LinearAddSpec:
    """A projection of one token that adds, and whose last block writes the norm."""
    return LinearAddSpec(LinearSpec(**linear, rows=1), RmsNormSpec(dim=linear["n"], rows=1, eps=eps))


def _sum_norm(dim: int, rows: int, eps: float, **others: Any) -> SumNormSpec:
    return SumNormSpec(dim=dim, rows=rows, norm=RmsNormSpec(dim=dim, rows=rows, eps=eps), **others)


def _counted_ffn(count: int, **block: Any) -> CountedFfnSpec:
    """A kernel with room for the block's `neurons`, which is given `count` of them."""
    del count
    return CountedFfnSpec(**block)


def _counted_send_mask(count: int, **mask: Any) -> CountedSendMaskSpec:
    del count
    return CountedSendMaskSpec(**mask)


# The kernels whose parameters are not their spec's.
_BUILDERS: Mapping[str, Callable[..., KernelSpec]] = {
    "counted_ffn": _counted_ffn,
    "counted_send_mask": _counted_send_mask,
    "linear_add": _linear_add,
    "sum_norm": _sum_norm,
}


def _spec(op: str, parameters: Mapping[str, Any]) -> KernelSpec:
    """Return the spec of `op`, which is named as it is: `rms_norm` is RmsNormSpec."""
    name = "".join(word.capitalize() for word in op.split("_"))
    build: Callable[..., KernelSpec] = _BUILDERS.get(op) or getattr(specs, f"{name}Spec")
    return build(**parameters)


# Tokens of a chunk of a prompt.
CHUNK = 512


@dataclass(frozen=True)
class Case:
    """`op` names a kernel. A case of `speed` is measured, for each of `shares` of its neurons where it has any.

    With `streamed` its weights are in memory of the host as well, which the GPU reads over the bus.
    """

    label: str
    op: str
    parameters: Mapping[str, Any]
    speed: bool = False
    shares: tuple[float, ...] = field(default=())
    streamed: bool = False

    def to_json(self, kernel: CudaKernel) -> dict[str, Any]:
        """The entry in the pack's list."""
        arguments = [
            {
                "name": each.name,
                "dtype": each.dtype,
                "shape": self._shape(each),
                "scratch": each.scratch,
                "tickets": each.access == "tickets",
            }
            for each in kernel.arguments
        ]
        return {**vars(self), "parameters": dict(self.parameters), "kernel": kernel.name, "arguments": arguments}

    def _shape(self, argument: KernelArgument) -> list[int]:
        """Return the shape of an argument, of which a case may have a `count` of all there is room for."""
        if argument.counted is None:
            return list(argument.shape)
        most = self.parameters["neurons" if argument.counted == "count" else "columns"]
        return [argument.shape[0] * self.parameters["count"] // most, *argument.shape[1:]]


def ffn(format_name: str, kind: str, neurons: int, dim: int, rows: int = 1, **others: Any) -> dict[str, Any]:
    """Parameters of a ReGLU block whose deciding matrix has a bias, which here decides what fires."""
    given = {"gated": True, "activation": "relu", "up_activation": "identity"}
    gated = others.get("gated", True)
    biases = {"gate_bias": gated, "up_bias": not gated, "down_bias": False}
    size = {"neurons": neurons, "dim": dim, "rows": rows}
    return {"kind": kind, "format": format_name, **size, **given, **biases, **others}


def whole_ffn(formats: tuple[str, str, str], neurons: int, dim: int, rows: int = 1) -> dict[str, Any]:
    """Parameters of a SwiGLU block that computes every neuron."""
    biases = {f"{name}_bias": False for name in ("gate", "up", "down")}
    given = {"gated": True, "activation": "silu", "up_activation": "identity", "counts": rows == 1, **biases}
    return {"formats": formats, "neurons": neurons, "dim": dim, "rows": rows, **given}


def attention(context: int, kv_dtype: str, rows: int = 1, heads: tuple[int, int, int] = (8, 2, 64)) -> dict[str, Any]:
    """Parameters of an attention with `heads` (query heads, key heads, width), of one token or of a chunk."""
    count, kv_heads, head_dim = heads
    return {
        "heads": count, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim, "context": context,
        "rows": rows, "kv_dtype": kv_dtype, "scale": head_dim**-0.5, "window": 0,
        "mode": "one" if rows == 1 else "chunk", "sequences": 1, "extend": rows == 1, "turn": rows == 1,
    }  # fmt: skip


def small_cases() -> Iterator[Case]:
    """Every kernel, small: seconds under a memory checker."""
    for form in QUANTIZATIONS:
        yield Case(f"linear {form}", "linear", {"format": form, "n": 333, "k": 420, "rows": 1, "bias": True})
        yield Case(f"linear chunk {form}", "linear", {"format": form, "n": 130, "k": 200, "rows": 70, "bias": False})
        linear = {"format": form, "n": 333, "k": 420, "bias": form == "q8", "eps": 1e-5}
        yield Case(f"linear with norm {form}", "linear_add", linear)
        yield Case(f"ffn masked {form}", "ffn", ffn(form, "masked", 330, 200), shares=(0.3,))
        yield Case(f"ffn exact {form}", "ffn", ffn(form, "exact", 330, 200), shares=(0.3,))
        yield Case(f"ffn dense {form}", "ffn", ffn(form, "dense", 330, 200))
        part = ffn(form, "masked", 900, 200, mask_columns=1000, count=330)
        yield Case(f"ffn part, shared {form}", "counted_ffn", part, shares=(0.3,))
        yield Case(f"ffn chunk, shared {form}", "counted_ffn", ffn(form, "dense", 900, 96, rows=70, count=330))
        yield Case(f"ffn chunk {form}", "ffn", ffn(form, "dense", 130, 96, rows=70))
        yield Case(f"embedding {form}", "embedding", {"format": form, "vocab": 50, "dim": 100, "rows": 5, "offset": 2})
        low_rank = {"formats": (form, form), "neurons": 300, "rank": 40, "dim": 200, "relu": False, "rows": 1}
        yield Case(f"predictor {form}", "predict_low_rank", low_rank)
    yield from _panels()
    yield Case("ffn without gate", "ffn", ffn("f16", "masked", 330, 200, gated=False), shares=(0.3,))
    yield Case("ffn part", "ffn", ffn("f16", "masked", 200, 96, mask_columns=333), shares=(0.3,))
    yield Case("ffn batch", "ffn", ffn("f16", "masked", 200, 96, rows=4), shares=(0.3,))
    signs = {"neurons": 150, "dim": 300, "row_bytes": sign_row_bytes(300), "rows": 1}
    yield Case("predictor by signs", "predict_signs", signs)
    for kv_dtype in ("float16", "q8"):
        yield Case(f"attention {kv_dtype}", "attention", attention(70, kv_dtype))
        yield Case(f"attention long {kv_dtype}", "attention", attention(3000, kv_dtype))
        yield Case(f"attention chunk {kv_dtype}", "attention", attention(200, kv_dtype, rows=20))
        write = {"kv_heads": 3, "head_dim": 72, "context": 50, "rows": 7, "kv_dtype": kv_dtype}
        yield Case(f"cache {kv_dtype}", "cache_write", {**write, "mode": "chunk", "sequences": 1})
    yield Case("rms_norm", "rms_norm", {"dim": 420, "rows": 5, "eps": 1e-5})
    yield Case("layer_norm", "layer_norm", {"dim": 420, "rows": 5, "eps": 1e-5, "weight": True, "bias": True})
    yield Case("rotary", "rotary", {"heads": 5, "head_dim": 20, "rows": 7, "context": 50, "mode": "chunk"})
    yield Case("add", "add", {"dim": 700, "rows": 5})
    yield Case("take_last", "take_last", {"dim": 700, "rows": 5})
    yield Case("join columns", "join_columns", {"widths": (64, 64, 20), "rows": 5})
    for vocab, rows in ((50, 1), (5003, 3), (70001, 1)):
        yield Case(f"top logits {vocab}", "top_logits", {"vocab": vocab, "rows": rows})
    yield from _transfers(dim=333, neurons=200, columns=60, rows=3)


def _panels() -> Iterator[Case]:
    """Kernels for matrices in panels: of each format without rows, and of kinds of codes and scales."""
    for form in FORMATS.builtin:
        if not FORMATS[form].rows:
            linear = {"format": form, "n": 336, "k": 420, "rows": 1, "bias": True, "panels": True}
            yield Case(f"linear {form}", "linear", linear)
    for form in ("q4_k", "q6_k", "q2_k", "nf4", "fp8"):
        linear = {"format": form, "n": 144, "k": 200, "rows": 70, "bias": False, "panels": True}
        yield Case(f"linear chunk {form}", "linear", linear)
    linear = {"format": "q4_k", "n": 336, "k": 512, "bias": False, "eps": 1e-5, "panels": True}
    yield Case("linear with norm q4_k", "linear_add", linear)
    table = {"format": "q6_k", "vocab": 48, "dim": 100, "rows": 5, "offset": 2, "panels": True}
    yield Case("embedding q6_k", "embedding", table)
    formats = ("q4_k", "q4_k", "q6_k")
    yield Case("ffn whole", "whole_ffn", whole_ffn(formats, 336, 208))
    yield Case("ffn whole chunk", "whole_ffn", whole_ffn(formats, 144, 96, rows=70))


def _transfers(dim: int, neurons: int, columns: int, rows: int, speed: bool = False) -> Iterator[Case]:
    yield Case("send", "send", {"dim": dim, "rows": rows}, speed)
    mask = {"dim": dim, "neurons": neurons, "columns": columns, "rows": rows}
    yield Case("send mask", "send_mask", mask, speed)
    fewer = {**mask, "count": columns // 8 * 4, "in_words": True}
    yield Case("send mask, shared", "counted_send_mask", fewer, speed)
    yield Case("receive", "receive", {"dim": dim, "rows": rows, "counted": True}, speed)
    summed = {"dim": dim, "rows": rows, "terms": 3, "eps": 1e-5}
    yield Case("sum with norm", "sum_norm", summed, speed)
    yield Case("sum with norm, received", "sum_norm", {**summed, "received": True, "counted": True}, speed)
    lent = {"kv_heads": 8, "width": 128, "dtype": "float16", "context": 4096 if speed else 90}
    yield Case("borrow cache", "borrow_cache", lent, speed)
    yield Case("receive mask", "receive_mask", {"neurons": neurons, "rows": rows}, speed)
    yield Case("copy words", "copy_words", {"words": 8}, speed)
    # A stage of weights: the copy engine moves it, which is in the list as a kernel.
    yield Case("upload", "upload", {"size": 2**26 if speed else 10_048}, speed)


def speed_cases() -> Iterator[Case]:
    """Yield the kernels of decoding, in the shapes of models of 7 and of 70 billion parameters."""
    for form in ("f16", "q4"):
        for n, k in ((4096, 4096), (8192, 8192), (32000, 8192)):
            linear = {"format": form, "n": n, "k": k, "rows": 1, "bias": False}
            yield Case(f"linear {n}x{k} {form}", "linear", linear, True)
        fused = {"format": form, "n": 8192, "k": 8192, "bias": False, "eps": 1e-5}
        yield Case(f"linear with norm 8192x8192 {form}", "linear_add", fused, True)
        shape = (28672, 8192)
        yield Case(f"ffn masked 28672x8192 {form}", "ffn", ffn(form, "masked", *shape), True, (0.05, 0.1, 0.2, 0.5))
        part = ffn(form, "masked", *shape, mask_columns=28672)
        yield Case(f"ffn part 28672x8192 {form}", "ffn", part, True, (0.1,))
        yield Case(f"ffn part, shared 28672x8192 {form}", "counted_ffn", {**part, "count": 28672}, True, (0.1,))
        yield Case(f"ffn exact 28672x8192 {form}", "ffn", ffn(form, "exact", *shape), True, (0.1,))
        yield Case(f"ffn dense 28672x8192 {form}", "ffn", ffn(form, "dense", *shape), True)
        sparse = (1.0, 0.7, 0.5, 0.3, 0.1, 0.05, 0.01)
        yield Case(f"ffn masked 4096x4096 {form}", "ffn", ffn(form, "masked", 4096, 4096), True, sparse)
    for form in ("q6", "q4m"):
        linear = {"format": form, "n": 8192, "k": 8192, "rows": 1, "bias": False}
        yield Case(f"linear 8192x8192 {form}", "linear", linear, True)
        yield Case(f"ffn masked 28672x8192 {form}", "ffn", ffn(form, "masked", 28672, 8192), True, (0.1,))
    for n, k in ((8192, 8192), (32000, 8192)):
        linear = {"format": "q4_k", "n": n, "k": k, "rows": 1, "bias": False, "panels": True}
        yield Case(f"linear {n}x{k} q4_k", "linear", linear, True)
    block = whole_ffn(("q4_k", "q4_k", "q6_k"), 28672, 8192)
    yield Case("ffn whole 28672x8192", "whole_ffn", block, True)
    plain = ffn("f16", "masked", 4096, 4096, gated=False)
    yield Case("ffn without gate 4096x4096 f16", "ffn", plain, True, (1.0, 0.7, 0.5, 0.3, 0.1))
    low_rank = {"neurons": 28672, "rank": 1024, "dim": 8192, "relu": False, "rows": 1}
    yield Case("predictor 28672x1024 f16", "predict_low_rank", {"formats": ("f16", "f16"), **low_rank}, True)
    # The format of predictors where weights have four bits, and the two beside it.
    for form in ("q8", "q6", "q4"):
        yield Case(f"predictor 28672x1024 {form}", "predict_low_rank", {"formats": (form, form), **low_rank}, True)
    signs = {"neurons": 28672, "dim": 8192, "row_bytes": sign_row_bytes(8192), "rows": 1}
    yield Case("predictor by signs 28672", "predict_signs", signs, True)
    for context in (512, 4096, 32768):
        for kv_dtype in ("float16", "q8"):
            heads = attention(context, kv_dtype, heads=(64, 8, 128))
            yield Case(f"attention {context} {kv_dtype}", "attention", heads, True)
    yield Case("rms_norm 8192", "rms_norm", {"dim": 8192, "rows": 1, "eps": 1e-5}, True)
    yield Case("add 8192", "add", {"dim": 8192, "rows": 1}, True)
    for vocab in (32000, 128256, 262144):
        yield Case(f"top logits {vocab}", "top_logits", {"vocab": vocab, "rows": 1}, True)
    yield from _transfers(dim=8192, neurons=28672, columns=20000, rows=1, speed=True)
    yield from chunk_cases()


def chunk_cases() -> Iterator[Case]:
    """Return kernels that read prompts of a model of 70 billion parameters."""
    for form in ("f16", "q4"):
        for n, k in ((8192, 8192), (28672, 8192)):
            linear = {"format": form, "n": n, "k": k, "rows": CHUNK, "bias": False}
            yield Case(f"linear {CHUNK} rows {n}x{k} {form}", "linear", linear, True)
        block = ffn(form, "dense", 28672, 8192, rows=CHUNK)
        yield Case(f"ffn dense {CHUNK} rows 28672x8192 {form}", "ffn", block, True)
    linear = {"format": "q4_k", "n": 8192, "k": 8192, "rows": CHUNK, "bias": False, "panels": True}
    yield Case(f"linear {CHUNK} rows 8192x8192 q4_k", "linear", linear, True)


def pack_kernels(cases: list[Case], output: Path, sm: int) -> list[dict[str, Any]]:
    """Compiles the kernels of `cases`, and that of the ping-pong, into the zip file `output`; the entries of the pack's
    list.
    """
    built = [cuda.write_kernel(_spec(case.op, case.parameters)) for case in cases]
    always = [cuda.write_kernel(spec) for spec in (PingPongSpec(), CopyWordsSpec(words=8))]
    with TemporaryDirectory() as work:
        build_cuda([*built, *always], Path(work), sm)
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(Path(work).iterdir()):
                archive.write(path, path.name)
    return [case.to_json(kernel) for case, kernel in zip(cases, built, strict=True)]
