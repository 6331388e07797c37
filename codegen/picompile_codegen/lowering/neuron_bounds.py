"""Finds how many neurons the blocks of a graph have on an accelerator, as far as their kernels depend on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from picompile_codegen.lowering.packing import name_and_format
from picompile_codegen.lowering.program import Device
from picompile_codegen.lowering.slices import slices_of
from picompile_passes.formats import FORMATS
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.predictors import predictor_kind


@dataclass(frozen=True)
class NeuronBounds:
    """The largest numbers of neurons that kernels are made for; None where all blocks have the same number.

    `decoded` is that of the GPU's blocks where tokens are decoded, `whole` that of its blocks, and of slices of cold
    neurons, in prompts; `listed` that of the host's blocks that compute the neurons of a mask. `sent` is that of
    neurons whose mask is sent to the host; with `sends_words` all are multiples of four.
    """

    decoded: int | None = None
    whole: int | None = None
    listed: int | None = None
    sent: int | None = None
    sends_words: bool = False


ALL_ALIKE = NeuronBounds()


def neuron_bounds(
    nodes: Sequence[Node], decoding: Mapping[Node, Device], prompts: Mapping[Node, Device]
) -> NeuronBounds:
    """Return the bounds for a graph with `nodes`, whose devices are those of a step and those of a prompt's chunk."""
    blocks = [node for node in nodes if is_call(node, SPARSE_FFN)]
    decoded = [_neurons(block) for block in blocks if decoding[block] == "accelerator" and _is_part(block)]
    of_host = [block for block in blocks if decoding[block] == "host"]
    listed = [_neurons(block) for block in of_host]
    sent = [_neurons(block) for block in of_host if decoding[_mask(block)] == "accelerator"]
    whole = [count for block in blocks if prompts[block] == "accelerator" for count in _pieces(block)]
    in_words = all(count % 4 == 0 for count in sent)
    return NeuronBounds(
        _most(decoded), whole=_most(whole), listed=_most(listed), sent=_most(sent), sends_words=in_words
    )


def _most(counts: Iterable[int]) -> int | None:
    """Return the largest of `counts` where they differ."""
    found = set(counts)
    return max(found) if len(found) > 1 else None


def _neurons(block: Node) -> int:
    return int(arguments(block)["up"].meta["val"].shape[0])


def _mask(block: Node) -> Node:
    mask: Node = arguments(block)["mask"]
    return mask


def _is_part(block: Node) -> bool:
    """Return whether a block computes a part of its mask's columns, or needs no mask."""
    return arguments(block)["neurons"] is not None or predictor_kind(arguments(_mask(block))["kind"]).in_block


def _pieces(block: Node) -> list[int]:
    """Return the numbers of neurons that are multiplied at once: those of slices, where weights come from the host."""
    if block.meta.get("neurons", "cold") != "cold":
        return [_neurons(block)]
    values = arguments(block)
    matrices = [values[name] for name in ("gate", "up", "down") if values[name] is not None]
    row_bytes = (FORMATS[name_and_format(each)[1]].row_bytes(int(each.meta["val"].shape[1])) for each in matrices)
    return [count for _, count in slices_of(_neurons(block), sum(row_bytes))]
