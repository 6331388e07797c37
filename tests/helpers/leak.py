"""`leak`: a token mixer with recurrent state, as a package would offer it, and a model that has one in each layer.

Nothing else knows it: it is found by the entry points that `install` writes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.state import state_tensors
from picompile_codegen.specs.arguments import (
    Declaration,
    StepSpec,
    floats,
    floats_out,
    recurrent,
)
from picompile_passes.dialect.operator import operator
from picompile_passes.dialect.state import State
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ADD, EMBEDDING, FFN, LINEAR, RMS_NORM, TRANSPOSE

HIDDEN, FFN_SIZE, VOCAB = 24, 40, 50


def _memory(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {"memory": (int(values["x"].meta["val"].shape[-1]),)}


@operator(
    part="mixer", dimensions={"x": "TD"}, result="TD", state=State("recurrent", _memory), namespace="picompile_testing"
)
def leak(x: Tensor, decay: float) -> Tensor:
    """y[t] = decay · y[t - 1] + x[t], where y is 0 before the first token. x [T, D] → [T, D]."""
    y, rows = torch.zeros_like(x[..., 0, :]), []
    for row in x.unbind(-2):
        y = decay * y + row
        rows.append(y)
    return torch.stack(rows, -2)


@dataclass(frozen=True)
class LeakSpec(StepSpec):
    """memory[slot] = decay · memory[slot] + x[t] for each row t in order, and y[t] is what it is then."""

    named = "leak_{dim}_{decay}_{step_name}_c{context}_s{sequences}"

    dim: int
    decay: float

    def declare(self) -> Iterator[Declaration]:
        yield floats("x", self.rows, self.dim)
        yield recurrent("memory", self.sequences, self.dim)
        yield floats_out("y", self.rows, self.dim)
        yield from self.step_arguments()

    def bodies(self) -> Mapping[str, Callable[[Any, Any], None]]:
        return {"cpu": _write}


def _write(spec: LeakSpec, function: KernelFunction) -> None:
    x, memory, y = function["x"], function["memory"], function["y"]
    rows = step_rows(function, spec)
    with loop(0, rows.count) as t, loop(0, spec.dim) as c:
        slot = rows.slot(t)
        memory[slot, c] = memory[slot, c] * spec.decay + x[t, c]
        y[t, c] = memory[slot, c]


def lower_leak(node: Node, function: Function) -> None:
    """Append the call of a leak."""
    values = arguments(node)
    spec = LeakSpec(dimension(node), values["decay"], **function.step)
    bindings: Bindings = {
        "x": function.value(values["x"]),
        "y": function.result(node),
        **state_tensors(node, function),
    }
    function.call(spec, bindings, layer=node.meta["layer"])


def install(folder: Path) -> None:
    """Write what pip would into `folder`, which is to be on sys.path."""
    info = folder / "leak-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leak\nVersion: 1.0\n")
    points = {"picompile.operators": "leak", "picompile.operator_kernels": "lower_leak"}
    sections = [f"[{group}]\nleak = helpers.leak:{name}\n" for group, name in points.items()]
    (info / "entry_points.txt").write_text("\n".join(sections))


def leaking(layers: int) -> GraphModule:
    """The canonical graph of a model whose only mixers are leaks."""
    b = GraphBuilder()
    x = b.call(EMBEDDING, b.tokens, b.parameter("model.embed.weight", VOCAB, HIDDEN), 0)
    for i in range(layers):
        name = f"model.layers.{i}"
        h = b.call(RMS_NORM, x, b.parameter(f"{name}.input_norm.weight", HIDDEN), 1e-5)
        h = b.call(LINEAR, h, b.parameter(f"{name}.in_proj.weight", HIDDEN, HIDDEN), None)
        mixed = b.call(leak.target, h, 0.5 + i / 8, layer=i)
        x = b.call(ADD, x, b.call(LINEAR, mixed, b.parameter(f"{name}.o_proj.weight", HIDDEN, HIDDEN), None))
        h = b.call(RMS_NORM, x, b.parameter(f"{name}.post_norm.weight", HIDDEN), 1e-5)
        gate, up = (b.parameter(f"{name}.{side}_proj.weight", FFN_SIZE, HIDDEN) for side in ("gate", "up"))
        down = b.call(TRANSPOSE, b.parameter(f"{name}.down_proj.weight", HIDDEN, FFN_SIZE), 0, 1)
        x = b.call(ADD, x, b.call(FFN, h, gate, up, down, None, None, None, "relu", "identity", layer=i))
    x = b.call(RMS_NORM, x, b.parameter("model.norm.weight", HIDDEN), 1e-5)
    return b.finish(b.call(LINEAR, x, b.parameter("lm_head.weight", VOCAB, HIDDEN), None))
