"""One function of a program while it is being built: its calls, its buffers, and where the value of each node is."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from picompile_codegen.kernels import Kernel
from picompile_codegen.kernels.step_rows import Mode
from picompile_codegen.packing import Matrix, WeightTable
from picompile_codegen.program import Arg, Call, FfnPart, Tensor
from picompile_codegen.retarget import Recipe

STEP = Arg("buffer", "step")
STATS_ROW_BYTES = 16

Bindings = dict[str, Arg | Matrix]


@dataclass(frozen=True)
class LowerOptions:
    """What the graph does not say.

    `context` and `chunk` in tokens; `kv_dtype` float16, float32 or q8; `sequences` have a place in the KV cache.
    """

    context: int
    chunk: int
    kv_dtype: str
    sequences: int = 1


@dataclass
class Shared:
    """What the functions of a program have in common."""

    options: LowerOptions
    weights: WeightTable = field(default_factory=WeightTable)
    state: dict[str, Tensor] = field(default_factory=dict)
    ffn: list[FfnPart] = field(default_factory=list)
    kernels: dict[Recipe, Kernel] = field(default_factory=dict)

    def kernel(self, builder: Callable[..., Kernel], **parameters: Hashable) -> Kernel:
        """Builds a kernel, once for the same parameters: most layers ask for the same few."""
        key = (builder, tuple(sorted(parameters.items())))
        if key not in self.kernels:
            self.kernels[key] = builder(**parameters)
        return self.kernels[key]


@dataclass
class Function:
    """`rows` is how many tokens a call can take: 1, or a chunk. `logits` names the buffer that the head writes."""

    name: str
    rows: int
    shared: Shared
    logits: str
    calls: list[Call] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Arg] = field(default_factory=dict)

    @property
    def mode(self) -> Mode:
        """Where the rows of a step are (see `kernels/step_rows.py`)."""
        if self.name == "batch":
            return "batch"
        return "one" if self.rows == 1 else "chunk"

    def buffer(self, hint: str, dtype: str, shape: tuple[int, ...]) -> Arg:
        """A new buffer, to be placed when the function is complete."""
        name = f"{self.name}.{len(self.buffers)}.{hint}"
        self.buffers[name] = Tensor(dtype, shape)
        return Arg("buffer", name)

    def result(self, node: Node) -> Arg:
        """A new buffer float32 [rows, dim] for the value of `node`."""
        self.values[node] = self.buffer(node.name, "float32", (self.rows, dimension(node)))
        return self.values[node]

    def vectors(self, values: dict[str, Any], *names: str) -> Bindings:
        """The vectors among the operands `names` of a node, those that are there."""
        return {name: self.shared.weights.vector(values[name]) for name in names if values[name] is not None}

    def call(
        self,
        kernel: Kernel,
        bindings: Bindings,
        *,
        op: str,
        layer: int | None = None,
        weight_bytes: int | None = None,
        window: int = 0,
    ) -> None:
        """Appends a call. Parameters are bound by name; scratch is made as the kernel asks for it.

        `weight_bytes` is the size of the matrices unless it is given; `window` as in `Call`.
        """
        args: list[Arg] = []
        for parameter in kernel.params:
            name, _, part = parameter.partition(".")
            if parameter in kernel.scratch:
                args.append(self.buffer(parameter, *kernel.scratch[parameter]))
                continue
            bound = STEP if name == "step" else bindings[name]
            args.append(bound.view(part) if isinstance(bound, Matrix) else bound)
        if weight_bytes is None:
            weight_bytes = sum(bound.bytes for bound in bindings.values() if isinstance(bound, Matrix))
        self.calls.append(Call(kernel.name, tuple(args), op, layer, weight_bytes, window))


def dimension(node: Node) -> int:
    """The last dimension of a value [T, dim]."""
    return int(node.meta["val"].shape[-1])
