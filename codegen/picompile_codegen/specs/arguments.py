"""Parts of a kernel's declaration: arguments, packed matrices, caches; and the base class of all specs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, ClassVar, Literal

from picompile_codegen.errors import CodegenError
from picompile_passes.formats import CACHE_FORMATS, FORMATS, GROUP, PANEL_ROWS
from picompile_passes.formats.panels import panel_bytes

STEP_SHAPE = (8,)
# A flag is a cache line, of which the first element counts.
FLAG_SHAPE = (16,)

# A kernel reads `in`, fills `out`, uses `scratch`, adds to the counters of `adds`, reads and writes the `state` of
# sequences, `sets` a flag, `awaits` one, and writes to `abandons` when it gives up. It finds zeros in `tickets`, and
# leaves zeros.
Access = Literal["in", "out", "scratch", "tickets", "adds", "state", "sets", "awaits", "abandons"]

# A mode tells where the rows of a step are; `cpu.token_ops.step_rows` reads them.
# `one`        the next token of one sequence: position step[1], slot step[2]
# `chunk`      consecutive tokens of one sequence: row t has position step[1] + t, slot step[2]
# `sequences`  each row is the next token of a sequence of its own: positions int32 [rows] and slots int32 [rows]
# A slot is a sequence's place in the caches. No kernel asks for it where they have one place only.
Mode = Literal["one", "chunk", "sequences"]

# Bytes of an element, by dtype.
ITEM_BYTES = {"float32": 4, "float16": 2, "int32": 4, "int64": 8, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class KernelArgument:
    """An argument of a kernel: `name`, `dtype` and static `shape`, its use, and bounds of its values.

    Integers that the kernel takes for indices must be less than `below`, and not negative; those that it writes are.
    `copies` names the argument of which this one becomes a copy. `counted` names an int32 [1] argument n; the first
    dimension then has `size * n / max_n` entries, where `max_n` is that argument's `below` - 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    access: Access = "in"
    below: int | None = None
    copies: str | None = None
    counted: str | None = None

    @property
    def scratch(self) -> bool:
        """Whether it is memory for the kernel's own use during a call."""
        return self.access == "scratch"

    @property
    def parts(self) -> "tuple[KernelArgument, ...]":
        """The argument itself: matrices and caches have several."""
        return (self,)


STEP = KernelArgument("step", "int32", STEP_SHAPE)


@dataclass(frozen=True)
class MatrixArgument:
    """A packed matrix [rows, columns]: `name`.data and, where the format has scales, `name`.scale.

    Both are views of the same bytes, typed as the data and as the scales. In `panels`, sixteen rows are one. `counted`
    as in `KernelArgument`.
    """

    name: str
    format: str
    rows: int
    columns: int
    panels: bool = False
    counted: str | None = None

    @property
    def parts(self) -> tuple[KernelArgument, ...]:
        """The arguments that the matrix is passed as."""
        form, rows = FORMATS[self.format], self.rows // PANEL_ROWS if self.panels else self.rows
        row_bytes = panel_bytes(form, self.columns) if self.panels else form.row_bytes(self.columns)
        shape = (rows, row_bytes // ITEM_BYTES[form.data_dtype])
        data = KernelArgument(f"{self.name}.data", form.data_dtype, shape, counted=self.counted)
        if form.scale is None:
            return (data,)
        shape = (rows, row_bytes // ITEM_BYTES[form.scale_dtype])
        return data, replace(data, name=f"{self.name}.scale", dtype=form.scale_dtype, shape=shape)


@dataclass(frozen=True)
class CacheArgument:
    """Keys or values of a layer: `name` and, in q8 and q4, `name`_scales. `dim` is the width of a row."""

    name: str
    kv_dtype: str
    sequences: int
    kv_heads: int
    context: int
    dim: int

    @property
    def parts(self) -> tuple[KernelArgument, ...]:
        """The arguments that the cache is passed as."""
        rows = (self.sequences, self.kv_heads, self.context)
        dtype, width = cache_data(self.kv_dtype, self.dim)
        data = KernelArgument(self.name, dtype, (*rows, width), "state")
        if self.kv_dtype not in CACHE_FORMATS:
            return (data,)
        return data, KernelArgument(f"{self.name}_scales", "float16", (*rows, scale_groups(self.dim)), "state")


@dataclass(frozen=True)
class ScratchPlace:
    """Marks where a body's scratch memory comes among the arguments. Host and accelerator need different memory."""

    name: str = ""
    parts: tuple[KernelArgument, ...] = ()


SCRATCH = ScratchPlace()

Declaration = KernelArgument | MatrixArgument | CacheArgument | ScratchPlace


class _NameForm(Formatter):
    """A form whose fields are a spec's: `{bias:b}` stands for b where `bias` holds, and for nothing elsewhere."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return (format_spec if value else "") if format_spec else str(value)


@dataclass(frozen=True)
class KernelSpec(ABC):
    """Declares a kernel: the fields are its parameters, from which its name and its arguments follow.

    Every spec is a frozen dataclass. Kernels of equal specs are the same kernel, so a name holds every parameter.

    Attributes:
        named: The form of the kernel's name, with fields in braces, unless `name` is overridden. `{bias:b}` is b where
            `bias` holds, and nothing elsewhere; parts between underscores that are empty are left out.
        op: What a program calls a call of the kernel; without one it is the name of the operator that is lowered.
    """

    named: ClassVar[str] = ""
    op: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The kernel's symbol. Artifacts contain it."""
        return symbol(*_NameForm().vformat(self.named, (self,), {}).split("_"))

    @abstractmethod
    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments behind `step` in order, with at most one `SCRATCH` among them."""

    @property
    def arguments(self) -> tuple[KernelArgument, ...]:
        """The arguments that a caller gives, in order: all but scratch."""
        return (STEP, *(part for each in self.declare() for part in each.parts))

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """Arguments with rows for each neuron, by name: whether those of all neurons are read, whatever a mask says."""
        return {}

    def bodies(self) -> Mapping[str, Callable[[Any, Any], None]]:
        """Return the bodies that the spec of a plug-in brings along, by the name of the back end.

        A body is called with the spec and the function being written: of the host a `cpu.kernel.KernelFunction`. It
        comes before one that the back end itself has (see `picompile_codegen.backend`).
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class StepSpec(KernelSpec):
    """Declares a kernel to which it matters where the `rows` of a step are (see `Mode`).

    Positions are below `context`, and slots below `sequences`.
    """

    rows: int
    context: int
    mode: Mode
    sequences: int = 1

    @property
    def step_name(self) -> str:
        """The part of the kernel's name that tells its mode from others."""
        return f"b{self.rows}" if self.mode == "sequences" else f"r{self.rows}"

    def step_arguments(self) -> Iterator[KernelArgument]:
        """Yield the arguments that locate rows: positions, and slots if there are several."""
        if self.mode == "sequences":
            yield indices("positions", self.rows, self.context)
            if self.sequences > 1:
                yield indices("slots", self.rows, self.sequences)


def symbol(*parts: object) -> str:
    """Return a C identifier that tells `parts` apart: `symbol("norm", 64, 1e-05)` is `norm_64_1em05`."""
    text = "_".join(str(part) for part in parts if part != "")
    return re.sub(r"[^0-9A-Za-z_]", "", text.replace(".", "p").replace("-", "m"))


def panels_name(panels: bool, activation_bytes: int) -> str:
    """Return the part of a kernel's name that says whether its matrices lie in panels, and what they are multiplied
    with."""
    return ("panels" + "16" * (activation_bytes == 2)) if panels else ""


def cache_data(kv_dtype: str, dim: int) -> tuple[str, int]:
    """Return the dtype of rows of a cache, and how many elements a row of `dim` numbers has.

    Raises:
        CodegenError: For rows that are not whole groups of 32, where the format needs these.
    """
    if kv_dtype not in CACHE_FORMATS:
        return kv_dtype, dim
    codec = FORMATS[kv_dtype]
    if codec.spread_cache and dim % GROUP:
        raise CodegenError(f"a cache in {kv_dtype} needs heads whose width is a multiple of {GROUP}, not {dim}")
    return codec.data_dtype, dim * codec.data_bits // 8


def scale_groups(dim: int) -> int:
    """Return how many scales a row of `dim` elements has in q8 and q4."""
    return -(-dim // GROUP)


def floats(name: str, *shape: int) -> KernelArgument:
    """Return a float32 argument that the kernel reads."""
    return KernelArgument(name, "float32", shape)


def floats_out(name: str, *shape: int) -> KernelArgument:
    """Return a float32 argument that the kernel fills."""
    return KernelArgument(name, "float32", shape, "out")


def indices(name: str, count: int, below: int) -> KernelArgument:
    """Return an int32 argument [count] of indices, each less than `below`."""
    return KernelArgument(name, "int32", (count,), below=below)


def mask(name: str, rows: int, columns: int, access: Access = "in") -> KernelArgument:
    """Return a uint8 argument [rows, columns] of zeros and ones."""
    return KernelArgument(name, "uint8", (rows, columns), access, below=2)


def count_up_to(most: int, name: str = "count") -> KernelArgument:
    """Return an int32 argument [1]: the number of entries in `counted` arguments that have room for `most`."""
    return KernelArgument(name, "int32", (1,), below=most + 1)


def counted(declaration: Declaration, by: str) -> Declaration:
    """Return `declaration` of an argument whose number of entries the argument `by` gives."""
    if isinstance(declaration, KernelArgument | MatrixArgument):
        return replace(declaration, counted=by)
    raise CodegenError(f"{declaration.name} is always there whole")


def recurrent(name: str, sequences: int, *shape: int) -> KernelArgument:
    """Return a float32 argument for recurrent state, of which each of `sequences` has `shape`."""
    return KernelArgument(name, "float32", (sequences, *shape), "state")


def flag(access: Access, name: str = "flag") -> KernelArgument:
    """Return an argument for a flag that the kernel sets, awaits or abandons."""
    return KernelArgument(name, "int32", FLAG_SHAPE, access)


def optional_floats(arguments: Iterable[tuple[str, int, bool]]) -> Iterator[KernelArgument]:
    """Yield a float32 vector for each (name, length, whether this variant of the kernel has it)."""
    return (floats(name, length) for name, length, present in arguments if present)
