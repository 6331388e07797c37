"""A large model is captured without its weights: they would not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig

from helpers.canonical import Model, canonicalize
from picompile.frontend.build import build_model, call_model
from picompile.frontend.export import export_decoder
from picompile.frontend.families import find_family
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ATTENTION

# Of llama-7b's 32 layers: more only take longer.
_LAYERS = 2


def _peak_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_capture_of_a_7b_shape_takes_no_memory_for_weights(model: Callable[[str], Model]) -> None:
    model("llama-relu")  # What torch.export loads at its first use is not counted.
    # From here on the peak is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    family = find_family({"architectures": ["LlamaForCausalLM"]})
    eager = build_model(family, LlamaConfig(num_hidden_layers=_LAYERS), "silu")
    canonical = canonicalize(export_decoder(eager, call_model, 4096))
    grown = _peak_bytes() - before
    assert len(list(calls(canonical.graph, ATTENTION))) == _LAYERS
    assert sum(parameter.numel() * 4 for parameter in eager.parameters()) > 2_600_000_000
    assert grown < 300_000_000, f"capture took {grown >> 20} MiB"
