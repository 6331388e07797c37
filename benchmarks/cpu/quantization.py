"""Measure a model's loss in each weight format against its bits, beside llama.cpp's formats.

python -m benchmarks.cpu.quantization MODEL [--work DIR] [--tokens 16384] [--llama LIBRARY] [--json FILE]

Every row is a copy of the model whose matrices are rounded, and nothing else: it runs in float32, layer by layer, on
held-out text of the standard library. Its perplexity and the mean KL divergence of its predictions are compared with
those of the model as it is. Bits are of the matrices that a token multiplies with, scales included and padding not.

With `--llama` the model is also written as a GGUF file in f16 and quantized by llama.cpp (`llama_model_quantize` of
libllama.so, as llama-quantize calls it, without an importance matrix); `pip install llama-cpp-python` brings the
library as llama_cpp/lib/libllama.so. Its files are read back and run in the same way.
"""

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import torch
from torch.fx import GraphModule

from benchmarks.peers.gguf import export
from benchmarks.script import argument_parser, write_json
from picompile.accuracy.distances import join_tokens, measure_tokens
from picompile.choices import base_format, parse_bits
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.windows import held_out_windows
from picompile.progress import NoProgress
from picompile.rounding import checkpoint_formats, round_checkpoint
from picompile.streaming import stream_windows
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import DEQUANTIZE, LINEAR, SPARSE_FFN
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

# Windows whose logits are in memory at a time.
_TOGETHER = 4
QUANTS = ("q4", "q4m", "5.0bpw", "5.2bpw", "5.5bpw", "q6", "q8")
# The numbers of llama.cpp's enum llama_ftype.
LLAMA = {"Q4_0": 2, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7}


@dataclass(frozen=True)
class Row:
    """A copy of a model: its bits a weight, its perplexity against the model's, and the mean KL divergence in nats."""

    name: str
    rounding: str
    bits: float
    perplexity: float
    relative_change: float
    kl_nats: float
    row_bytes: int | None = None


@dataclass(frozen=True)
class Bench:
    """A model, the windows that its copies read, and a folder for what is kept."""

    model: Path
    captured: Captured
    windows: Sequence[Sequence[int]]
    work: Path
    rounding_tokens: int

    def row(self, name: str, rounding: str, bits: float, graph: GraphModule, weights: WeightSource) -> Row:
        """Read the text with the model and with a copy."""
        dense, parts = canonicalize(self.captured.graph_module), []
        for start in range(0, len(self.windows), _TOGETHER):
            some = self.windows[start : start + _TOGETHER]
            pairs = zip(_logits(dense, self.captured.weights, some), _logits(graph, weights, some), some, strict=True)
            parts += [measure_tokens(a[:-1], b[:-1], torch.tensor(list(ids)[1:])) for a, b, ids in pairs]
        found = join_tokens(parts)
        change = math.expm1((found.nll - found.reference_nll).mean())
        return Row(name, rounding, bits, math.exp(found.nll.mean()), change, float(found.kl.mean()))

    def ours(self, quant: str, *, calibrated: bool) -> Row:
        """Quantize as `compile` does."""
        options = ProfileOptions(tokens=self.rounding_tokens)
        tensors: Mapping[str, str] = {}
        predicted = InsertPredictors()(canonicalize(self.captured.graph_module)).graph_module
        if parse_bits(quant) is not None:
            tensors = checkpoint_formats(
                self.model,
                predicted,
                self.captured.weights,
                self.work / "bits",
                options,
                parse_bits(quant),
                NoProgress(),
            ).formats
        graph = Quantize(base_format(quant), tensors=tensors)(predicted).graph_module
        weights: WeightSource = self.captured.weights
        if calibrated:
            folder = self.work / f"rounding-{quant}"
            weights = round_checkpoint(self.model, graph, weights, folder, options, NoProgress())
        bits, row_bytes = _bits(graph)
        row = self.row(quant, "calibrated" if calibrated else "nearest", bits, graph, weights)
        return Row(**(asdict(row) | {"row_bytes": row_bytes}))

    def llama(self, library: Path) -> Iterator[Row]:
        """Quantize with llama.cpp."""
        folder = self.work / "llama"
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / "f16.gguf"
        if not whole.exists():
            export(self.model, folder / "f16.partial", "f16", vocabulary=True)
            (folder / "f16.partial").rename(whole)
        for name, number in LLAMA.items():
            path = folder / f"{name}.gguf"
            if not path.exists():
                _llama_quantize(library, whole, path, number)
            # llama.cpp's architecture has another activation, which changes no weight.
            captured = load_model(path, self.captured.facts.activation)
            yield self.row(name, "llama.cpp", _gguf_bits(path), canonicalize(captured.graph_module), captured.weights)


def _logits(graph: GraphModule, weights: WeightSource, windows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    stream_windows(graph, weights, windows, lambda _, value: found.append(value))
    return found


def _bits(graph: GraphModule) -> tuple[float, int]:
    """Return the bits of a weight that a token multiplies with, and the bytes of all these rows, padding included."""
    weights, bits, row_bytes = 0, 0.0, 0
    for node in calls(graph.graph, LINEAR, SPARSE_FFN):
        operands = [arguments(node).get(name) for name in ("weight", "gate", "up", "down")]
        for operand in operands:
            if operand is None or not is_call(operand, DEQUANTIZE):
                continue
            form, (rows, columns) = FORMATS[arguments(operand)["format"]], operand.meta["val"].shape
            weights += rows * columns
            bits += rows * columns * form.bits
            row_bytes += rows * form.row_bytes(columns)
    return bits / weights, row_bytes


def _gguf_bits(path: Path) -> float:
    """Return the same of a GGUF file; its table of embeddings counts where there is no other head."""
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
    untied = any(tensor.name == "output.weight" for tensor in tensors)
    looked_up = ("token_embd.weight", "position_embd.weight") if untied else ("position_embd.weight",)
    read = [tensor for tensor in tensors if tensor.name not in looked_up]
    return 8 * sum(int(tensor.n_bytes) for tensor in read) / sum(int(tensor.n_elements) for tensor in read)


class _Parameters(ctypes.Structure):
    """The first members of struct llama_model_quantize_params, and room for all later ones."""

    _fields_ = (("threads", ctypes.c_int32), ("ftype", ctypes.c_int), ("rest", ctypes.c_char * 248))


def _llama_quantize(library: Path, source: Path, output: Path, number: int) -> None:
    llama = ctypes.CDLL(str(library))
    llama.llama_model_quantize_default_params.restype = _Parameters
    llama.llama_model_quantize.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Parameters))
    llama.llama_backend_init()
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = number
    partial = output.with_suffix(".partial")
    if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"llama.cpp cannot quantize {source}")
    partial.rename(output)


def show(row: Row) -> None:
    """Print a row."""
    print(
        f"{row.name:8} {row.rounding:10} {row.bits:6.3f} bits {row.perplexity:9.4f} "
        f"{100 * row.relative_change:+8.3f} % KL {row.kl_nats:.5f}",
        flush=True,
    )


def main() -> None:
    """Measure every row."""
    parser = argument_parser(__doc__, "model", "--json", work=Path("build/bench-quantization"), rounding_tokens=32_768)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of held-out text")
    parser.add_argument("--quants", default=",".join(QUANTS))
    parser.add_argument("--llama", type=Path, help="libllama.so")
    given = parser.parse_args()
    captured = load_model(given.model)
    windows, source = held_out_windows(given.model, tokens=given.tokens)
    print(f"{given.model}, {sum(map(len, windows))} tokens of {source}")
    bench = Bench(given.model, captured, windows, given.work / given.model.name, given.rounding_tokens)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        show(row)
        write_json(given.json, {"model": str(given.model), "rows": [asdict(row) for row in rows]})

    for quant in filter(None, given.quants.split(",")):
        add(bench.ours(quant, calibrated=False))
        if FORMATS.get(quant, FORMATS["q4"]).data_bits < 8:
            add(bench.ours(quant, calibrated=True))
    if given.llama is not None:
        for row in bench.llama(given.llama):
            add(row)


if __name__ == "__main__":
    main()
