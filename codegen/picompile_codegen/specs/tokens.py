"""Kernels that treat each token by itself: embedding, sums, norms, rotary embedding, linear layers, top logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from picompile_codegen.specs.arguments import (
    SCRATCH,
    Declaration,
    KernelArgument,
    KernelSpec,
    MatrixArgument,
    StepSpec,
    floats,
    floats_out,
    indices,
    optional_floats,
    panels_name,
    symbol,
)

# More than top-k of most programs (40 or 50), and few enough to go to the host in no time.
MOST_TOP_LOGITS = 64


@dataclass(frozen=True)
class AddSpec(KernelSpec):
    """y = a + b. a, b float32 [rows, dim] → y [rows, dim]."""

    named = "add_{dim}_r{rows}"
    op = "add"

    dim: int
    rows: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("a", self.rows, self.dim)
        yield floats("b", self.rows, self.dim)
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class TakeLastSpec(KernelSpec):
    """y[0] = x[n - 1], the last of the rows that count. x float32 [rows, dim] → y [1, dim]."""

    named = "take_last_{dim}_r{rows}"
    op = "take_last"

    dim: int
    rows: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        yield floats_out("y", 1, self.dim)


@dataclass(frozen=True)
class JoinColumnsSpec(KernelSpec):
    """y[t] = x0[t], x1[t], … one behind the other. Each xi float32 [rows, widths[i]] → y float32 [rows, Σ widths]."""

    op = "linear"

    widths: tuple[int, ...]
    rows: int

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return symbol("join_columns", "x".join(map(str, self.widths)), f"r{self.rows}")

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        for number, width in enumerate(self.widths):
            yield floats(f"x{number}", self.rows, width)
        yield floats_out("y", self.rows, sum(self.widths))


@dataclass(frozen=True)
class EmbeddingSpec(KernelSpec):
    """y[t] = w[ids[t] + offset]. ids int32 [rows], w packed [vocab, dim] → y float32 [rows, dim].

    An id outside the table reads whatever lies there: ids are checked before they get here. With `panels`, w is laid
    out in panels: it is a head's matrix as well, or in a format that has no rows.
    """

    named = "embedding_{format}_{vocab}x{dim}_r{rows}_o{offset}_{panels:panels}"

    format: str
    vocab: int
    dim: int
    rows: int
    offset: int
    panels: bool = False

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield indices("ids", self.rows, self.vocab - self.offset)
        yield MatrixArgument("w", self.format, self.vocab, self.dim, panels=self.panels)
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class RmsNormSpec(KernelSpec):
    """y = x / sqrt(mean(x²) + eps) · weight, for each of `groups` parts of a row by itself.

    x float32 [rows, dim], weight float32 [dim] → y like x.
    """

    op = "norm"

    dim: int
    rows: int
    eps: float
    groups: int = 1

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return symbol("rms_norm", self.dim, f"r{self.rows}", self.eps, _groups(self.groups))

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        yield floats("weight", self.dim)
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class LayerNormSpec(KernelSpec):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, for each of `groups` parts of a row by itself.

    x float32 [rows, dim], weight, bias [dim] → y like x.
    """

    op = "norm"

    dim: int
    rows: int
    eps: float
    weight: bool
    bias: bool
    groups: int = 1

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        vectors = "w" * self.weight + "b" * self.bias
        return symbol("layer_norm", self.dim, f"r{self.rows}", self.eps, vectors, _groups(self.groups))

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        yield from optional_floats([("weight", self.dim, self.weight), ("bias", self.dim, self.bias)])
        yield floats_out("y", self.rows, self.dim)


def _groups(groups: int) -> str:
    return "" if groups == 1 else f"g{groups}"


@dataclass(frozen=True)
class DivideByRmsSpec(KernelSpec):
    """y = x[:, :dim] / sqrt(x[:, dim] / neurons + eps) + bias: a norm whose sum of squares is known.

    x float32 [rows, dim + 1], bias float32 [dim] → y [rows, dim].
    """

    named = "divide_by_rms_{dim}_r{rows}_n{neurons}_{eps}_{bias:b}"
    op = "ffn_norm"

    dim: int
    rows: int
    neurons: int
    eps: float
    bias: bool

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim + 1)
        yield from optional_floats([("bias", self.dim, self.bias)])
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """y = an expression of x0, x1 …, as `picompile_passes.dialect.expressions` describes it → y float32 [rows, dim].

    `inputs` has a letter for each: `r` float32 [rows, dim], `t` one number for each token, [rows, 1], `v` a constant
    vector [dim], `n` a constant number [1].
    """

    dim: int
    rows: int
    inputs: str
    expression: str

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        digest = sha256(self.expression.encode()).hexdigest()[:16]
        return symbol("elementwise", self.dim, f"r{self.rows}", self.inputs, digest)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        shapes = {"r": (self.rows, self.dim), "t": (self.rows, 1), "v": (self.dim,), "n": (1,)}
        for number, kind in enumerate(self.inputs):
            yield floats(f"x{number}", *shapes[kind])
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class RotarySpec(StepSpec):
    """Turn each head's (x[i], x[i + d/2]) by the angle of its position, whose cosine and sine are in tables.

    x float32 [rows, heads · d], cos and sin float32 [context, d/2] → y like x. Positions are those of `mode`.
    """

    named = "rotary_{heads}x{head_dim}_{step_name}_c{context}"

    heads: int
    head_dim: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.heads * self.head_dim)
        yield from angles(self.context, self.head_dim)
        yield floats_out("y", self.rows, self.heads * self.head_dim)
        yield from self.step_arguments()


@dataclass(frozen=True)
class LinearSpec(KernelSpec):
    """y = x · wᵀ + bias. x float32 [rows, k], w packed [n, k], bias float32 [n] → y float32 [rows, n].

    With `rowwise`, the CPU's kernel gives each row the bits that a kernel with rows = 1 gives it. So does the CPU's
    with `panels`, whose w is laid out in panels (`formats/panels.py`). In panels, a CPU multiplies x as integers of
    `activation_bytes` bytes, one or two.
    """

    op = "linear"

    format: str
    n: int
    k: int
    rows: int
    bias: bool
    rowwise: bool = False
    panels: bool = False
    activation_bytes: int = 1

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        biased, rows = "b" if self.bias else "", ("each" if self.rowwise else "r") + str(self.rows)
        panels = panels_name(self.panels, self.activation_bytes)
        return symbol("linear", self.format, f"{self.n}x{self.k}", rows, biased, panels)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.k)
        yield MatrixArgument("w", self.format, rows=self.n, columns=self.k, panels=self.panels)
        yield from optional_floats([("bias", self.n, self.bias)])
        yield SCRATCH
        yield floats_out("y", self.rows, self.n)


@dataclass(frozen=True)
class TopLogitsSpec(KernelSpec):
    """The n = min(64, vocab) highest logits of each row, highest first, and their tokens.

    logits float32 [rows, vocab] → scores float32 [rows, n], ids int32 [rows, n]. Of equal logits the lower token comes
    first; NaN comes before all numbers.
    """

    named = "leading_logits_{vocab}_r{rows}"
    op = "leading"

    vocab: int
    rows: int

    @property
    def count(self) -> int:
        """The number of logits of a row that are kept."""
        return min(MOST_TOP_LOGITS, self.vocab)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("logits", self.rows, self.vocab)
        yield floats_out("scores", self.rows, self.count)
        yield KernelArgument("ids", "int32", (self.rows, self.count), "out", below=self.vocab)
        yield SCRATCH


def angles(context: int, head_dim: int) -> Iterator[KernelArgument]:
    """Yield the tables of a rotary embedding: cos and sin float32 [context, head_dim / 2]."""
    yield floats("cos", context, head_dim // 2)
    yield floats("sin", context, head_dim // 2)
