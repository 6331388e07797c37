"""A large model is captured without its weights: they would not fit."""

import time
from pathlib import Path

import pytest
import torch
from canonical import canonicalize
from picompile_passes.nodes import calls
from picompile_passes.operands import ATTENTION
from transformers import LlamaConfig

from picompile.capture.export import export_decoder
from picompile.capture.families import find_family
from picompile.capture.hf import build_model, call_model

# Of llama-7b, whose 32 layers only take longer: 1.9 GB in float32.
_LAYERS = 2


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_capture_of_a_7b_shape_takes_no_memory_for_weights(model: object) -> None:
    model("llama-relu")  # type: ignore[operator]  # what torch.export loads at its first use is not counted
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes()
    start = time.process_time()
    config = LlamaConfig(num_hidden_layers=_LAYERS)
    family = find_family({"architectures": ["LlamaForCausalLM"]})
    eager = build_model(family, config, "silu")
    size = sum(parameter.numel() * 4 for parameter in eager.parameters())
    graph_module = export_decoder(eager, call_model, 4096)
    assert len(list(calls(graph_module.graph, ATTENTION))) == _LAYERS
    grown = _resident_bytes() - before
    assert size > 2_600_000_000
    assert grown < 300_000_000, f"capture took {grown >> 20} MiB"
    assert time.process_time() - start < 60
    del graph_module, eager
    torch.manual_seed(0)
    assert canonicalize  # the passes are measured through load_model in the compile test
