"""Experts' matrices are read, rounded and packed in runs: the bytes are those of the whole stack, in less memory."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from frontend.stored.test_stored_mxfp4 import save_gpt_oss
from helpers.alive_bytes import AliveBytes
from helpers.gguf_mixtures import save_mixture
from helpers.quantized_files import Scheme
from helpers.quantized_mixtures import save_quantized_mixture
from helpers.quantized_numbers import KINDS
from picompile.compile.four_bits import _sampled_rows
from picompile.frontend.hf import open_checkpoint
from picompile.predictors.store import OverlayWeights
from picompile_passes.formats.packing import quantize_rows
from picompile_passes.graph import packed_rows
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.packed_rows import PackedRows
from picompile_passes.graph.weight_source import load_rows

_SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30}
_SIZES |= {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 16, "max_position_embeddings": 64}


def _mixtral(folder: Path, *, stacked: bool = False) -> Path:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**_SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    if stacked:
        save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def _quantized(folder: Path, kind: str) -> Path:
    scheme = Scheme(desc_act=True)
    make, config = (scheme.make, scheme.config) if kind == "gptq" else (KINDS[kind].make, KINDS[kind].config)
    save_quantized_mixture(folder, make, config, hidden_size=256, num_experts=16, num_hidden_layers=1)
    return folder


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "a tensor for each expert": _mixtral,
    "stacks": lambda folder: _mixtral(folder, stacked=True),
    "GPTQ": lambda folder: _quantized(folder, "gptq"),
    "FP8": lambda folder: _quantized(folder, "fp8-blocks"),
    "MXFP4": save_gpt_oss,
    "GGUF": lambda folder: save_mixture(folder, "qwen3moe", type_name="Q8_0"),
    "GGUF, F32": lambda folder: save_mixture(folder, "qwen3moe"),
    "GGUF, gate and up in one": lambda folder: save_mixture(folder, "qwen3moe", type_name="Q8_0", fused=True),
    "GGUF, transposes": lambda folder: save_mixture(folder, "gpt-oss", type_name="Q8_0"),
}


@pytest.fixture(params=CHECKPOINTS)
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSource:
    folder = tmp_path / "model"
    folder.mkdir()
    return open_checkpoint(CHECKPOINTS[request.param](folder)).weights


def _stacks(weights: WeightSource) -> list[str]:
    found = [name for name in weights.names() if ".experts." in name and len(weights.shape(name)) == 3]
    assert found
    return found[:2]


def _rows(weights: WeightSource, name: str, transposed: bool, table: Tensor | None = None) -> PackedRows:
    return PackedRows(name, torch.empty(weights.shape(name), device="meta"), "q6", transposed, table)


@pytest.mark.slow("unpacks and rounds numbers many times; others are fast", but=("stacks", "MX", "a tensor", "GG"))
def test_the_bytes_of_runs_are_those_of_the_whole_stack(weights: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _stacks(weights):
        values = weights.load(name)
        for transposed in (False, True):
            rows = (values.transpose(1, 2) if transposed else values).flatten(0, 1)
            some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[: len(rows) // 3]
            for table in (None, torch.arange(0, len(rows), 2), some):
                wanted = rows if table is None else rows[table]
                for run_bytes in (1, 20_000, 1 << 30):
                    monkeypatch.setattr(packed_rows, "_RUN_BYTES", run_bytes)
                    packed = _rows(weights, name, transposed, table).pack(weights)
                    assert torch.equal(packed, quantize_rows(wanted, "q6")), (name, transposed, run_bytes)


def test_some_rows(weights: WeightSource) -> None:
    """Rows of one expert, of several, in any order and twice, and those by which 4 bits are chosen."""
    for name in _stacks(weights):
        rows = weights.load(name).flatten(0, 1)
        for wanted in (torch.tensor([5]), torch.tensor([len(rows) - 1, 0, 7, 7]), torch.arange(3, len(rows) - 3)):
            found = load_rows(weights, name, wanted)
            assert found.dtype == rows.dtype and torch.equal(found, rows[wanted]), name
            assert torch.equal(load_rows(OverlayWeights(weights, {}, weights.load), name, wanted), rows[wanted])
        sampled = rows[:: max(1, len(rows) // 64)][:64]
        assert torch.equal(_sampled_rows(weights, name), sampled.float())


@pytest.mark.slow(
    "unpacks numbers again and again; one method is fast", but=("stacks", "MXFP4", "a tensor", "GGUF", "GPTQ")
)
def test_memory_holds_a_run_beside_the_packed_rows(weights: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs of one expert it is a few times the float32 values of one, whatever the number of experts."""
    for name in _stacks(weights):
        one = 4 * math.prod(weights.shape(name)[1:])
        for transposed in (False, True):
            peaks = []
            for run_bytes in (1, 1 << 30):
                monkeypatch.setattr(packed_rows, "_RUN_BYTES", run_bytes)
                rows = _rows(weights, name, transposed)
                with AliveBytes() as alive:
                    packed = rows.pack(weights)
                peaks.append(alive.peak - packed.nbytes)
            few, all_experts = peaks
            # What unpacks the numbers of GPTQ takes most, and numbers of rows count in matrices that are this small.
            assert few < 7 * one, (name, transposed, few / one)
            # Rows of stacks in a file are packed where they lie.
            assert not transposed or all_experts > 1.3 * few
