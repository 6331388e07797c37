"""`--quant stored`: a format for each matrix of a quantized checkpoint, so that it keeps the numbers it has.

A matrix that plain numbers make, or numbers that no format of ours has, is in a format that rounds it hardly: float16,
or q8 where it had fewer bits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from picompile.choices import DEFAULT_QUANT, STORED
from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.frontend.captured import Captured
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, attribute, has_real_data, is_call
from picompile_passes.graph.operands import (
    INDEX_SELECT,
    PREDICTORS,
    SPARSE_FFN,
    TRANSPOSE,
    computes_every_neuron,
    matrix_operands,
)

# Formats of matrices whose numbers cannot be kept: of what was plain, and of what had codes.
_PLAIN, _ROUNDED = "f16", "q8"


def stored_formats(weights: WeightSource) -> Mapping[str, str | None]:
    """Return the format that has the numbers of each quantized matrix of `weights`, None where no format has them."""
    stored: Callable[[], Mapping[str, str | None]] | None = getattr(weights, "stored", None)
    return {} if stored is None else stored()


def default_quant(options: CompileOptions, captured: Captured) -> str:
    """Return the weight format of a model where the user leaves it open: that it is stored in, if there is one.

    Kernels of accelerators read rows, and calibration rounds anew: for these it is another.

    Raises:
        UsageError: the user asks for the stored numbers of a checkpoint that is not quantized, or in no format of ours.
    """
    is_stored = any(form is not None for form in stored_formats(captured.weights).values())
    if options.quant == STORED and not is_stored:
        raise UsageError(f"quant {STORED} given, but the model has no numbers in a format of ours; choose a format")
    keeps = options.back_end is None and options.rounding != "calibrated"
    return STORED if is_stored and keeps else DEFAULT_QUANT


@dataclass(frozen=True)
class StoredChoice:
    """Formats of matrices, by their parameters. `rounded` counts those that are rounded, by the format they get."""

    formats: Mapping[str, str]
    rounded: Counter[str] = field(default_factory=Counter)

    @property
    def text(self) -> str:
        """One line about what is kept."""
        kept = Counter(self.formats.values()) - self.rounded
        found = f"weights as the checkpoint has them: {_counted(kept)}"
        if not self.rounded:
            return found
        return f"{found}; rounded again, because no kernel reads their numbers so: {_counted(self.rounded)}"


def _counted(formats: Counter[str]) -> str:
    return ", ".join(f"{count} matrices in {name}" for name, count in formats.most_common()) or "none"


def choose_stored(captured: Captured, graph_module: GraphModule) -> StoredChoice:
    """Return a format for each quantized matrix of a predicted graph: its own wherever kernels read it so."""
    stored, rounded = stored_formats(captured.weights), dict[str, str]()
    uses = {node: list(_uses(graph_module, node)) for node in graph_module.graph.nodes}
    # A matrix that one node cannot read as it is has another format for all, and so have those of the same block.
    while lost := _lost(uses, stored, rounded):
        rounded |= lost
    used = [use.parameter for each in uses.values() for use in each]
    formats = {name: form for name in used if (form := rounded.get(name) or stored.get(name)) is not None}
    return StoredChoice(formats, Counter(rounded.values()))


def _lost(
    uses: Mapping[Node, Sequence["_Use"]], stored: Mapping[str, str | None], rounded: Mapping[str, str]
) -> dict[str, str]:
    """Return other formats for matrices that a node cannot read as they are, where those in `rounded` have others."""
    lost = dict[str, str]()
    for node, each in uses.items():
        kept = [
            stored.get(use.parameter) if use.parameter not in rounded and use.is_readable(stored) else None
            for use in each
        ]
        is_block = is_call(node, SPARSE_FFN)
        if is_block and not (computes_every_neuron(node) and all(map(_has_panels, each, kept))):
            # Its matrices are read together, neuron by neuron.
            kept = [None] * len(each)
        plain = is_block and any(use.parameter not in stored for use in each)
        for use, form in zip(each, kept, strict=True):
            if form is None and use.parameter in stored and use.parameter not in rounded:
                lost.setdefault(use.parameter, _PLAIN if plain else _ROUNDED)
    return lost


@dataclass(frozen=True)
class _Use:
    """A matrix of a node: `rows` rows of a parameter, or with `transposed` of its transpose."""

    parameter: str
    rows: int
    transposed: bool

    def is_readable(self, stored: Mapping[str, str | None]) -> bool:
        """Return whether kernels read these rows in the format that has the parameter's numbers."""
        form = stored.get(self.parameter)
        return form is not None and not self.transposed and (FORMATS[form].rows or FORMATS[form].has_panels(self.rows))


def _has_panels(use: _Use, form: str | None) -> bool:
    return form is not None and FORMATS[form].has_panels(use.rows)


def _uses(graph_module: GraphModule, node: Node) -> Iterator[_Use]:
    """Yield the matrices of a node that are made of one parameter of the model."""
    down = arguments(node)["down"] if is_call(node, SPARSE_FFN) else None
    for operand in matrix_operands(node):
        rows, columns = (int(size) for size in operand.meta["val"].shape)
        transposed, source = operand is down, operand
        if is_call(source, INDEX_SELECT) and source.args[1] == 0:
            source = source.all_input_nodes[0]
        if is_call(source, TRANSPOSE):
            transposed, source = not transposed, source.all_input_nodes[0]
        name = str(source.target)
        is_parameter = source.op == "get_attr" and not has_real_data(attribute(graph_module, name))
        if is_parameter and not name.startswith(PREDICTORS):
            yield _Use(name, columns if operand is down else rows, transposed)
