"""Feed-forward blocks, and the predictors that say which of their neurons to compute."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from picompile_codegen.specs.arguments import (
    SCRATCH,
    Declaration,
    KernelArgument,
    KernelSpec,
    MatrixArgument,
    count_up_to,
    counted,
    floats,
    floats_out,
    indices,
    mask,
    optional_floats,
    panels_name,
    symbol,
)
from picompile_passes.dialect.activations import parse_activation

# Arguments of a block with a row, or several, for each of its neurons.
OF_NEURONS = ("table", "decide_w", "neuron_w", "gate_bias", "up_bias", "gate_limits", "output_limits")


@dataclass(frozen=True)
class FfnSpec(KernelSpec):
    """y = h · down + down_bias, h = activation(x · gateᵀ + gate_bias) ∘ up_activation(x · upᵀ + up_bias).

    Without a gate (`gated` False), h = activation(x · upᵀ + up_bias). x float32 [rows, dim], y like x, biases float32
    [neurons] and [dim]. `neuron_w` is a bundle: the rows of one neuron follow one another.

    | kind | `decide_w` | bundle | rows = 1 computes |
    | --- | --- | --- | --- |
    | `dense` | | gate, up, down or up, down | every neuron |
    | `exact`, gated | gate | up, down | up and down of neurons whose gate is above the activation's threshold |
    | `exact`, not gated | up | down | down of neurons whose up is above it |
    | `masked` | | gate, up, down or up, down | the neurons of `mask` |

    A neuron adds nothing to y if |activation(x · gateᵀ + gate_bias)| is not above its number in `gate_limits`, or if
    |h| is at most that in `output_limits`, float32 [neurons], where there are limits. With `gate_limits`, which only
    gated blocks have, `exact` lists the neurons above them. Rows of a neuron that is left out are not read further.

    With `squares`, y has one more column, Σ h² over the neurons that are computed and above their limits.

    `mask` uint8 [rows, neurons] holds 0 or 1. With `mask_columns` it has that many columns instead, and neuron r is
    column `table`[r], int32 [neurons]. With several rows, `masked` computes each row's own
    neurons. The other kinds compute all, unless they are `rowwise`: then the CPU's kernel gives each row the bits that
    a kernel with rows = 1 gives it, as the CPU's `masked` kernels do. With `in_tiles`, which the CPU alone has, a
    `masked` kernel computes all neurons as `dense` does, and sets the h of those that a row's mask leaves out to 0.

    A block of `experts` has `gains` float32 [rows, experts]: expert e is the `neurons` / `experts` neurons from
    e · `neurons` / `experts` on, and at most `chosen` experts of a row have a gain other than 0. Only their neurons are
    computed, as the kind says, and y sums gain · h · down; limits and `stats` are of h before the gain. With
    `expert_bias`, float32 [experts · dim], y adds the gain of each expert times its `dim` numbers. The CPU alone has
    this. Its kernels for several rows compute all neurons of the experts where they would otherwise compute all, or
    those whose gate, or up where there is none, is above the threshold of a sparse activation.

    `stats` int64 [2] is the number of computed neurons and the number of those with h ≠ 0, or of those above their
    limits, summed over rows. Only kernels with rows = 1 count, `masked` ones and the CPU's `rowwise` ones. A kernel
    adds to it and does not set it.
    """

    op = "ffn"

    kind: str
    format: str
    neurons: int
    dim: int
    rows: int
    gated: bool
    activation: str
    up_activation: str
    gate_bias: bool
    up_bias: bool
    down_bias: bool
    mask_columns: int | None = None
    squares: bool = False
    rowwise: bool = False
    gate_limits: bool = False
    output_limits: bool = False
    in_tiles: bool = False
    experts: int = 0
    chosen: int = 0
    expert_bias: bool = False

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        up = "" if self.up_activation == "identity" else f"up_{self.up_activation}"
        biases = "g" * self.gate_bias + "u" * self.up_bias + "d" * self.down_bias + "e" * self.expert_bias
        limits = "g" * self.gate_limits + "o" * self.output_limits
        return symbol(
            "ffn",
            self.kind,
            self.format,
            f"{self.neurons}x{self.dim}",
            ("each" if self.rowwise else "tiles" if self.in_tiles else "r") + str(self.rows),
            "gated" if self.gated else "plain",
            self.activation,
            up,
            biases and f"b{biases}",
            "" if self.mask_columns is None else f"of{self.mask_columns}",
            "squares" if self.squares else "",
            limits and f"limits{limits}",
            _chosen(self.chosen, self.experts),
        )

    @property
    def is_exact(self) -> bool:
        """Whether one matrix, kept apart from the bundle, decides which neurons are computed."""
        return self.kind == "exact"

    @property
    def is_masked(self) -> bool:
        """Whether a mask, made by another kernel, says which neurons are computed."""
        return self.kind == "masked"

    @property
    def has_flat_mask(self) -> bool:
        """Whether the rows of the mask are one dimension."""
        return False

    @property
    def threshold(self) -> float:
        """A neuron is silent unless its product with the gating matrix is above this."""
        return parse_activation(self.activation).threshold

    @property
    def is_sparse(self) -> bool:
        """Whether the activation sets neurons to zero, regardless of the predictor kind."""
        return parse_activation(self.activation).sparse

    @property
    def has_limits(self) -> bool:
        """Whether neurons that add little are left out."""
        return self.gate_limits or self.output_limits

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """Arguments with rows for each neuron, by name: whether those of all neurons are read."""
        gating = ("decide_w", "gate_bias" if self.gated else "up_bias", "gate_limits") if self.is_exact else ()
        return {name: self.kind == "dense" or name in gating for name in OF_NEURONS}

    @property
    def expert_neurons(self) -> int:
        """Neurons of an expert."""
        return self.neurons // self.experts

    @property
    def row_neurons(self) -> int:
        """The most neurons that a row computes."""
        return self.chosen * self.expert_neurons if self.experts else self.neurons

    @property
    def bundle_parts(self) -> int:
        """Rows of a neuron in the bundle."""
        return 2 + self.gated - self.is_exact

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        columns = self.mask_columns or self.neurons
        yield floats("x", self.rows, self.dim)
        if self.is_masked:
            yield mask("mask", self.rows, columns)
        if self.mask_columns is not None:
            yield indices("table", self.neurons, columns)
        if self.experts:
            yield floats("gains", self.rows, self.experts)
        if self.is_exact:
            yield MatrixArgument("decide_w", self.format, self.neurons, self.dim)
        yield MatrixArgument("neuron_w", self.format, self.neurons * self.bundle_parts, self.dim)
        yield from optional_floats(
            [
                ("gate_bias", self.neurons, self.gate_bias),
                ("up_bias", self.neurons, self.up_bias),
                ("down_bias", self.dim, self.down_bias),
                ("gate_limits", self.neurons, self.gate_limits),
                ("output_limits", self.neurons, self.output_limits),
                ("expert_bias", self.experts * self.dim, self.expert_bias),
            ]
        )
        yield KernelArgument("stats", "int64", (2,), "adds")
        yield SCRATCH
        yield floats_out("y", self.rows, self.dim + self.squares)


@dataclass(frozen=True)
class WholeFfnSpec(KernelSpec):
    """y = h · downᵀ + down_bias, h = activation(x · gateᵀ + gate_bias) ∘ up_activation(x · upᵀ + up_bias).

    It computes every neuron, with matrices in panels (`formats/panels.py`): gate and up packed [neurons, dim] and down
    [dim, neurons], in `formats` of their own. Without a gate h = activation(x · upᵀ + up_bias), and `formats` are those
    of up and down. x float32 [rows, dim], y like x, biases float32 [neurons] and [dim]. A CPU multiplies x and h as
    integers of `activation_bytes` bytes, and gives each row the bits that it has alone.

    `stats` int64 [2] is the number of computed neurons and the number of those with h ≠ 0, summed over rows. A kernel
    that `counts` adds to it.
    """

    op = "ffn"

    formats: tuple[str, ...]
    neurons: int
    dim: int
    rows: int
    gated: bool
    activation: str
    up_activation: str
    gate_bias: bool
    up_bias: bool
    down_bias: bool
    activation_bytes: int = 1
    counts: bool = True

    @property
    def row_neurons(self) -> int:
        """The most neurons that a row computes."""
        return self.neurons

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        up = "" if self.up_activation == "identity" else f"up_{self.up_activation}"
        biases = "g" * self.gate_bias + "u" * self.up_bias + "d" * self.down_bias
        return symbol(
            "ffn_whole",
            *(self.formats if len(set(self.formats)) > 1 else self.formats[:1]),
            f"{self.neurons}x{self.dim}",
            f"r{self.rows}",
            "gated" if self.gated else "plain",
            self.activation,
            up,
            biases and f"b{biases}",
            panels_name(True, self.activation_bytes),
            "counted" if self.counts else "",
        )

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """Arguments with rows or columns for each neuron, all of which are read."""
        return dict.fromkeys(("gate_w", "up_w", "down_w", "gate_bias", "up_bias"), True)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        names = ("gate_w", "up_w") if self.gated else ("up_w",)
        for name, form in zip(names, self.formats, strict=False):
            yield MatrixArgument(name, form, rows=self.neurons, columns=self.dim, panels=True)
        yield MatrixArgument("down_w", self.formats[-1], rows=self.dim, columns=self.neurons, panels=True)
        yield from optional_floats(
            [
                ("gate_bias", self.neurons, self.gate_bias),
                ("up_bias", self.neurons, self.up_bias),
                ("down_bias", self.dim, self.down_bias),
            ]
        )
        yield KernelArgument("stats", "int64", (2,), "adds")
        yield SCRATCH
        yield floats_out("y", self.rows, self.dim)


@dataclass(frozen=True)
class CountedFfnSpec(FfnSpec):
    """An `FfnSpec` for blocks of `neurons` neurons or fewer: `count` int32 [1] says how many a block has.

    Where layers differ in their neurons, they share this kernel. Its arguments are those of the block itself, with
    `count` rows for `neurons`, and matrices with as many times fewer. A mask of the block's own neurons is uint8
    [rows · count], without gaps. The CPU has this kernel for `masked` alone.
    """

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return symbol("counted", super().name)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        for declaration in super().declare():
            if declaration.name in OF_NEURONS:
                yield counted(declaration, "count")
            elif declaration.name == "mask" and self.has_flat_mask:
                flat = KernelArgument("mask", "uint8", (self.rows * self.neurons,), below=2)
                yield counted(flat, "count")
            else:
                yield declaration
            if declaration.name == "x":
                yield count_up_to(self.neurons)

    @property
    def has_flat_mask(self) -> bool:
        """Whether the mask has the columns of `count` neurons, which lie row behind row."""
        return self.mask_columns is None


@dataclass(frozen=True)
class PredictLowRankSpec(KernelSpec):
    """mask[t, j] = 1 where fc2[j] · h[t] + bias[j] > threshold, else 0; h = fc1 · x, or relu(fc1 · x) with `relu`.

    x float32 [rows, dim], fc1 packed [rank, dim], fc2 packed [neurons, rank], in `formats`, bias float32 [neurons],
    threshold float32 [1] → mask uint8 [rows, neurons]. With `panels` fc1 and fc2 are laid out in panels, on the CPU.

    Neurons of `experts` are predicted for those alone that a token has chosen, by `gains` as in an `FfnSpec`; the
    others are 0 in the mask, and nothing of them is read. The CPU alone has this.
    """

    formats: tuple[str, str]
    neurons: int
    rank: int
    dim: int
    relu: bool
    rows: int = 1
    panels: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        shape, kind = f"{self.neurons}x{self.rank}x{self.dim}", "relu" if self.relu else "linear"
        layout, chosen = "panels" if self.panels else "", _chosen(self.chosen, self.experts)
        return symbol("predict", kind, *self.formats, shape, _rows(self.rows), layout, chosen)

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """Of experts, what has a row for each neuron. No block without experts is predicted by parts."""
        return {"fc2": True, "bias": True} if self.experts else {}

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        if self.experts:
            yield floats("gains", self.rows, self.experts)
        yield MatrixArgument("fc1", format=self.formats[0], rows=self.rank, columns=self.dim, panels=self.panels)
        yield MatrixArgument("fc2", format=self.formats[1], rows=self.neurons, columns=self.rank, panels=self.panels)
        yield floats("bias", self.neurons)
        yield floats("threshold", 1)
        yield SCRATCH
        yield mask("mask", self.rows, self.neurons, "out")


@dataclass(frozen=True)
class PredictSignsSpec(KernelSpec):
    """mask[t, j] = 1 where x[t] and row j of the matrix differ in sign in `most` columns or fewer, else 0.

    x float32 [rows, dim], signs int32 [neurons, row_bytes / 4], most float32 [1] → mask uint8 [rows, neurons]. Of
    `experts`, those that a token has chosen are predicted alone, as with a `PredictLowRankSpec`.
    """

    neurons: int
    dim: int
    row_bytes: int
    rows: int = 1
    experts: int = 0
    chosen: int = 0

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """The signs, which are read for all neurons."""
        return {"signs": True}

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        chosen = _chosen(self.chosen, self.experts)
        return symbol("predict", "signs", f"{self.neurons}x{self.dim}", _rows(self.rows), chosen)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        if self.experts:
            yield floats("gains", self.rows, self.experts)
        yield KernelArgument("signs", "int32", (self.neurons, self.row_bytes // 4))
        yield floats("most", 1)
        yield SCRATCH
        yield mask("mask", self.rows, self.neurons, "out")


def _chosen(chosen: int, experts: int) -> str:
    return f"{chosen}of{experts}" if experts else ""


def _rows(rows: int) -> str:
    return f"r{rows}" if rows > 1 else ""
