"""One function of a program while it is built: its calls, the values of nodes, and where its buffers lie in the arena.

Buffers whose lifetimes do not overlap share memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from picompile_codegen.backend import BackEnd
from picompile_codegen.cpu.kernel import WrittenKernel
from picompile_codegen.lowering.arena import Lifetime, place_buffers
from picompile_codegen.lowering.neuron_bounds import ALL_ALIKE, NeuronBounds
from picompile_codegen.lowering.packing import PackedMatrix, WeightTable
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_codegen.lowering.program import (
    Arg,
    Device,
    FfnPart,
    Memory,
    ProgramCall,
    ProgramState,
    ProgramTensor,
    TopLogitsBuffers,
    tensor_bytes,
)
from picompile_codegen.lowering.slices import STAGING
from picompile_codegen.registry import BACK_ENDS
from picompile_codegen.specs import FLAG_SHAPE, STEP_SHAPE, CopyWordsSpec, KernelSpec, Mode
from picompile_passes.dialect import operator_name


def _lifetimes(calls: Sequence[ProgramCall], sizes: Mapping[str, int]) -> list[Lifetime]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, call in enumerate(calls):
        for arg in call.args:
            if arg.space == "buffer" and arg.name in sizes:
                first.setdefault(arg.name, index)
                last[arg.name] = index
    return [Lifetime(name, sizes[name], first[name], last[name]) for name in first]


def plan_buffers(
    calls: Sequence[ProgramCall],
    buffers: Mapping[str, ProgramTensor],
    base: int,
    overlap: Callable[[Lifetime, Lifetime], bool] = Lifetime.overlaps,
) -> tuple[dict[str, ProgramTensor], int]:
    """Give every buffer of one function an offset from `base` on; return them and the end of the arena in bytes.

    Two of them share memory where they do not `overlap` (see `arena.place_buffers`).
    """
    sizes = {name: tensor_bytes(tensor.dtype, tensor.shape) for name, tensor in buffers.items()}
    placed, end = place_buffers(_lifetimes(calls, sizes), base, overlap)
    offsets = {life.name: offset for life, offset in placed.items()}
    planned = {name: replace(tensor, offset=offsets[name]) for name, tensor in buffers.items() if name in offsets}
    return planned, end


STATS_ROW_BYTES = 16
# These functions compute the neurons of masks, and count them; the others compute every neuron.
DECODING = ("decode", "batch")

Bindings = dict[str, Arg | PackedMatrix]
HOST = "cpu"
"""The host's back end."""


@dataclass(frozen=True)
class LowerOptions:
    """Options of lowering that the graph does not contain.

    `context` and `chunk` in tokens; `kv_dtype` float16, float32, q8 or q4; `sequences` have a place in the state.
    `accelerator` names the back end of a GPU (`cuda`), of a second partition of the CPU (`cpu`) or of a plug-in, None
    for a program that has none, and `placement` says what runs there. With `scores_masks` a program without an
    accelerator has the function `score_masked` as well, if its predictors have kernels for chunks. A step of `batch`
    can check `draft_tokens` tokens of a draft beside the one that it reads anyway, on the CPU. Without `panels` weights
    are laid out as a GPU reads them, though the program has none. `only_decoding` leaves out the functions that read
    prompts, for a planner. Matrices in panels are multiplied with activations of `activation_bytes` bytes.
    """

    context: int
    chunk: int
    kv_dtype: str
    sequences: int = 1
    accelerator: str | None = None
    placement: Placement = ON_HOST
    scores_masks: bool = False
    draft_tokens: int = 0
    panels: bool = True
    only_decoding: bool = False
    activation_bytes: int = 1

    @property
    def back_end(self) -> BackEnd:
        """The accelerator's back end; without one the host's."""
        return BACK_ENDS[self.accelerator or HOST]

    @property
    def batch_rows(self) -> int:
        """The most tokens that a step of `batch` reads; 1 if there is no such function."""
        return self.sequences if self.accelerator is not None else max(self.sequences, self.draft_tokens + 1)


@dataclass
class Shared:
    """State that the functions of a program share: among it kernels by spec, the host's and the accelerator's.

    `joined` are projections that are one where a step has one token (see `fusion.py`), `bounds` the largest numbers of
    neurons of kernels that layers share (see `counted.py`). `resident` are weights that the accelerator reads when it
    decodes tokens, and so has in its memory.
    """

    options: LowerOptions
    weights: WeightTable = field(default_factory=WeightTable)
    state: dict[str, ProgramState] = field(default_factory=dict)
    ffn: list[FfnPart] = field(default_factory=list)
    kernels: dict[KernelSpec, WrittenKernel] = field(default_factory=dict)
    accelerator_kernels: dict[KernelSpec, WrittenKernel] = field(default_factory=dict)
    transfers: int = 0
    streamed: dict[str, None] = field(default_factory=dict)
    staging_bytes: int = 0
    joined: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    bounds: NeuronBounds = ALL_ALIKE
    resident: frozenset[str] = frozenset()

    @property
    def stats_rows(self) -> int:
        """The number of rows of the statistics that are taken."""
        return len(self.ffn)

    def kernel(self, device: Device, spec: KernelSpec) -> WrittenKernel:
        """Return the kernel of `spec`, which is built once: most layers ask for the same few.

        Raises:
            UnsupportedGraphError: For a spec that has no body for `device`.
        """
        built = self.kernels if device == "host" else self.accelerator_kernels
        if spec not in built:
            back_end = BACK_ENDS[HOST] if device == "host" else self.options.back_end
            built[spec] = back_end.kernel(spec)
        return built[spec]


@dataclass
class Function:
    """One function of a program while it is built.

    `rows` is how many tokens a call can take: 1, or a chunk. `logits` names the buffer that the head writes,
    `top_logits` those with the highest of them, where the head is on the accelerator.

    Calls are appended for `node`, which is being lowered, and its `device`; `devices` has that of every node.
    The accelerator computes the nodes `lent` with weights and state that are the host's.
    A value that the other device needs is sent there as soon as it is made; `arrivals` has what then waits for it and
    gives its place (see `transfer.py`). `counts` has, by mask, how many neurons of it the host computes.
    """

    name: str
    rows: int
    shared: Shared
    logits: str
    devices: Mapping[Node, Device] = field(default_factory=dict)
    lent: frozenset[Node] = frozenset()
    device: Device = "host"
    node: Node | None = None
    calls: list[ProgramCall] = field(default_factory=list)
    buffers: dict[str, ProgramTensor] = field(default_factory=dict)
    values: dict[tuple[Node, Device], Arg] = field(default_factory=dict)
    arrivals: dict[Node, Callable[["Function"], Arg]] = field(default_factory=dict)
    inputs: dict[str, Arg] = field(default_factory=dict)
    counts: dict[Node, Arg] = field(default_factory=dict)
    top_logits: TopLogitsBuffers | None = None
    staged: int = 0

    @property
    def mode(self) -> Mode:
        """The mode of a step's rows (see `specs.arguments.Mode`)."""
        if self.name == "batch":
            return "sequences"
        return "one" if self.rows == 1 else "chunk"

    @property
    def step(self) -> dict[str, Any]:
        """The fields of a `StepSpec` for this function's rows."""
        options = self.shared.options
        return {"rows": self.rows, "context": options.context, "mode": self.mode, "sequences": options.sequences}

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation that matrices in panels are multiplied with; GPUs multiply floats."""
        options = self.shared.options
        return 1 if self.device == "accelerator" and options.back_end.is_gpu else options.activation_bytes

    def buffer(self, hint: str, dtype: str, shape: tuple[int, ...], memory: Memory | None = None) -> Arg:
        """Return a new buffer, in the memory of the current device or in `memory`, to be placed when all is
        complete."""
        name = f"{self.name}.{len(self.buffers)}.{hint}"
        self.buffers[name] = ProgramTensor(dtype, shape, memory=memory or self.device)
        return Arg("buffer", name)

    def result(self, node: Node, dtype: str = "float32") -> Arg:
        """Return a new buffer [rows, dim] for the value of `node`; shared where the accelerator needs what the host
        makes."""
        is_shared = self.device == "host" and self.crosses(node)
        buffer = self.buffer(node.name, dtype, (self.rows, dimension(node)), "shared" if is_shared else None)
        self.values[node, self.device] = buffer
        return buffer

    def crosses(self, node: Node) -> bool:
        """Return whether the other device uses the value of `node`."""
        return any(self.devices.get(user, self.device) != self.device for user in node.users)

    def has(self, node: Node) -> bool:
        """Return whether some call has made the value of `node`."""
        return (node, "host") in self.values or (node, "accelerator") in self.values

    def value(self, node: Node) -> Arg:
        """Return the value of `node` for the current device, which waits for it where the other has made it."""
        if (node, self.device) not in self.values:
            self.values[node, self.device] = self.arrivals[node](self)
        return self.values[node, self.device]

    def input(self, name: str) -> Arg:
        """Return a buffer that the runtime writes before each step: step, tokens, positions or slots."""
        if self.device == "host":
            return Arg("buffer", name)
        self.inputs[name] = Arg("buffer", self.own(name))
        return self.inputs[name]

    def own(self, name: str) -> str:
        """Return the name of the current device's own buffer, where both devices have one called `name`."""
        return name if self.device == "host" else f"{name}.accelerator"

    def flag(self) -> Arg:
        """Return a new flag of this step. Functions never run at the same time, so they share their flags."""
        number = sum(1 for call in self.calls if call.op in ("send", "signal"))
        self.shared.transfers = max(self.shared.transfers, number + 1)
        (words,) = FLAG_SHAPE
        return Arg("buffer", "flags", shape=FLAG_SHAPE, offset=number * words * 4)

    def next_staging(self) -> str:
        """Return the name of the staging buffer for the next slice of weights: there are two, in turns."""
        self.staged += 1
        return STAGING[self.staged % len(STAGING)]

    def counters(self, row: int) -> Arg:
        """Return row `row` of the statistics of this function, for a kernel's `stats`."""
        name = self.own("stats.batch" if self.name == "batch" else "stats")
        return Arg("buffer", name, shape=(2,), offset=row * STATS_ROW_BYTES)

    @property
    def unused_counters(self) -> Arg:
        """The row that all functions that read prompts share, which is never read."""
        return Arg("buffer", self.own("stats.unused"))

    def vectors(self, values: dict[str, Any], *names: str) -> Bindings:
        """Return the vectors among the operands `names` of a node, those that are there."""
        return {name: self.shared.weights.vector(values[name]) for name in names if values[name] is not None}

    def call(
        self,
        spec: KernelSpec,
        bindings: Bindings,
        *,
        op: str = "",
        layer: int | None = None,
        weight_bytes: int | None = None,
        window: int = 0,
    ) -> None:
        """Append a call of the kernel of `spec`. Parameters are bound by name; scratch is made as the kernel asks.

        `op` is what the spec says unless it is given, or the name of the node's operator; `weight_bytes` the size of
        the matrices unless it is given; `window` as in `ProgramCall`.
        """
        kernel, args = self.shared.kernel(self.device, spec), list[Arg]()
        for parameter in kernel.params:
            name, _, part = parameter.partition(".")
            if parameter in kernel.scratch:
                args.append(self.buffer(parameter, *kernel.scratch[parameter]))
                continue
            if parameter == "tickets":
                args.append(Arg("buffer", "tickets", shape=(kernel.tickets,)))
                continue
            bound = bindings[name] if name in bindings else self._place(name)
            args.append(bound.view(part) if isinstance(bound, PackedMatrix) else bound)
        if weight_bytes is None:
            weight_bytes = sum(bound.bytes for bound in bindings.values() if isinstance(bound, PackedMatrix))
        self.calls.append(
            ProgramCall(
                kernel.name,
                tuple(args),
                op or spec.op or operator_name(self.node and self.node.target),
                layer,
                weight_bytes=weight_bytes,
                window=window,
                device=self.device,
                node=self.node,
            )
        )

    def _place(self, name: str) -> Arg:
        """Return the buffer that says where rows are: one for all of them, or one for each."""
        return self.input(name) if name == "step" else replace(self.input(name), shape=(self.rows,))

    def read_inputs(self, rows: int) -> None:
        """Prepend the calls that copy the inputs that the accelerator reads to its own memory; `rows` are those of the
        buffers."""
        calls, self.calls, self.device, self.node = self.calls, [], "accelerator", None
        for name, arg in self.inputs.items():
            spec = CopyWordsSpec(STEP_SHAPE[0] if name == "step" else rows)
            self.call(spec, {"step": Arg("buffer", "step"), "source": Arg("buffer", name), "y": arg})
        self.calls += calls


def dimension(node: Node) -> int:
    """Return the last dimension of a value [T, dim]."""
    return int(node.meta["val"].shape[-1])
