"""Takes neurons out of the model that did not fire on a text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.errors import PassOptionError
from picompile_passes.graph.nodes import arguments, attribute, calls, is_call
from picompile_passes.graph.operands import FFN, INDEX_SELECT, NEURON_ROWS
from picompile_passes.graph.rewriter import Rewriter
from picompile_silent.counts_file import Counts, read_counts


@dataclass(frozen=True)
class DropSilentNeurons(Pass):
    """Takes out the neurons that fired fewer than `at_least` times by the file `counts`.

    1. The gate, up, down, gate_bias and up_bias of an `ffn` become `index_select`s of their rows by one table, which
       holds the numbers of the neurons that stay. `down_bias` stays whole.
    2. The neuron that fired most stays in any case, so that no block is empty.
    3. A layer of which nothing goes, or that the file does not name, stays as it is.
    4. A block that this pass has made smaller before is selected anew: its table says which counts are those of its
       rows. The note `silent_dropped` on the block is the number of neurons that are gone.
    5. A block with a norm across its neurons stays as it is, since that divides by their number; and so does a block of
       experts, which must have equally many neurons each.

    The logits stay the same only where all that is dropped is silent; on other texts the model is another one.
    """

    name: ClassVar[str] = "drop-silent-neurons"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.CANONICAL
    default_effect: ClassVar[Effect] = Effect.CHANGES

    counts: str = field(metadata={"help": "JSON file, layer → firings of each neuron; python -m picompile_silent"})
    at_least: int = field(default=1, metadata={"help": "neurons that fired fewer times go"})

    def __post_init__(self) -> None:
        """Reads the file at once, so that a wrong one is told before a model is captured."""
        if self.at_least < 1:
            raise PassOptionError(f"option at_least of pass {self.name}: {self.at_least} is not 1 or more")
        _ = self.firings

    @cached_property
    def firings(self) -> Counts:
        """Return the firing counts in the file. Raise `PassOptionError` if it holds none."""
        return read_counts(Path(self.counts).expanduser())

    def rewrite(self, rewriter: Rewriter) -> None:
        """Applies the rules. Raises `PassOptionError` where the counts are not those of this model."""
        blocks = {block.meta.get("layer"): block for block in calls(rewriter.graph, FFN)}
        for layer in self.firings:
            if layer not in blocks:
                raise PassOptionError(f"firing counts {self.counts}: no layer {layer} of the model has neurons")
        for layer, counts in self.firings.items():
            self._shrink(rewriter, blocks[layer], counts)

    def _shrink(self, rewriter: Rewriter, block: Node, counts: Sequence[int]) -> None:
        layer, values = block.meta["layer"], arguments(block)
        whole, rows = _whole(rewriter.graph_module, values)
        total = int(whole["up"].meta["val"].shape[0])
        if len(counts) != total:
            raise PassOptionError(f"firing counts {self.counts}: layer {layer} has {total} neurons, not {len(counts)}")
        kept = _kept(rows, counts, self.at_least)
        if len(kept) == len(rows) or values["norm_eps"] is not None or values["gains"] is not None:
            return
        table = rewriter.constant(f"layer_{layer}_firing_neurons", torch.tensor(kept), sources=(block,))
        selected = {
            name: rewriter.call(INDEX_SELECT, (weight, 0, table), before=block, sources=(weight,))
            for name, weight in whole.items()
        }
        smaller = rewriter.call(FFN, [*(values | selected).values()], before=block, sources=(block,))
        rewriter.annotate(smaller, silent_dropped=total - len(kept))
        rewriter.replace(block, smaller)


def _kept(rows: Sequence[int], counts: Sequence[int], at_least: int) -> list[int]:
    """Those of the neurons `rows` that fired often enough, or else the one that fired most."""
    return [row for row in rows if counts[row] >= at_least] or [max(rows, key=counts.__getitem__)]


def _whole(graph_module: GraphModule, values: dict[str, Any]) -> tuple[dict[str, Node], Sequence[int]]:
    """The block's weights by neuron, before this pass ever selected from them, and which of their rows it has."""
    weights = {name: values[name] for name in NEURON_ROWS if values[name] is not None}
    if not _is_ours(weights["up"]):
        return weights, range(int(weights["up"].meta["val"].shape[0]))
    table = attribute(graph_module, str(arguments(weights["up"])["index"].target))
    return {name: arguments(weight)["self"] for name, weight in weights.items()}, table.tolist()


def _is_ours(weight: Node) -> bool:
    origin = weight.meta.get("from")
    return is_call(weight, INDEX_SELECT) and origin is not None and origin.pass_name == DropSilentNeurons.name
