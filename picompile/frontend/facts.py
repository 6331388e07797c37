"""The facts of a model: read off its canonical graph, so that they are what is compiled, and off its config before."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import ModelFacts
from picompile.frontend.families import EXPERT_COUNTS, rope_reach, text_config, text_limit
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, EMBEDDING, FFN, expert_count
from picompile_passes.graph.stamps import stamps_of
from picompile_passes.passes.canonicalize import raised_form

# Fields of configs for the longest text, where it is not called max_position_embeddings.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads")
# Models without a table of positions have no limit of their own.
_MOST_POSITIONS = 2048


@dataclass(frozen=True)
class GraphFacts:
    """Facts that the canonical graph shows. `positions` is the longest text, None where nothing bounds it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: str
    positions: int | None


def graph_facts(captured: GraphModule, what: str) -> GraphFacts:
    """Return the facts of a captured graph. A model without a feed-forward block has `ffn` 0.

    Raises `UnsupportedModelError`, which names `what` it is, for a graph without attention, and what the raising passes
    raise.
    """
    graph, stamps = raised_form(captured).graph, stamps_of(captured)
    attentions, blocks = list(calls(graph, ATTENTION)), list(calls(graph, FFN))
    if not attentions:
        raise UnsupportedModelError(f"{what} is no decoder: it has no attention")
    attention = arguments(attentions[0])
    block = arguments(blocks[0]) if blocks else None
    logits = graph.output_node().args[0]
    assert isinstance(logits, Node)
    lookups = [arguments(node) for node in calls(graph, EMBEDDING)]
    tables = [_width(each["weight"], 0) - each["offset"] for each in lookups if each["ids"].target == "positions"]
    return GraphFacts(
        hidden=_width(arguments(blocks[0])["down"]) if blocks else _width(next(iter(lookups))["weight"]),
        layers=len(attentions) if stamps is None else len(stamps.sources),
        heads=attention["heads"],
        kv_heads=attention["kv_heads"],
        head_dim=_width(attention["q"]) // attention["heads"],
        ffn=0 if block is None else _width(block["down"], 0),
        vocab=_width(logits),
        activation="identity" if block is None else block["activation"],
        positions=min(tables, default=None),
    )


def block_activations(captured: GraphModule) -> list[str]:
    """Return the activations of the feed-forward blocks of a captured graph, each once, as the dialect has them.

    Raises what the raising passes raise.
    """
    blocks = calls(raised_form(captured).graph, FFN)
    return sorted({arguments(block)["activation"] for block in blocks})


def expert_blocks(captured: GraphModule) -> list[Node]:
    """Return the feed-forward blocks of experts of a captured graph, raised. Raises what the raising passes raise."""
    return [block for block in calls(raised_form(captured).graph, FFN) if expert_count(block)]


def has_experts(captured: GraphModule) -> bool:
    """Return whether a block of a captured graph is one of experts. Raises what the raising passes raise."""
    return bool(expert_blocks(captured))


def names_experts(config: Mapping[str, Any]) -> bool:
    """Return whether the contents of a config.json have a number of experts, of more than one."""
    parts = ("text_config", "ffn_config")
    nested = [value for key, value in config.items() if key in parts and isinstance(value, Mapping)]
    counts = (value for key, value in config.items() if key in EXPERT_COUNTS)
    return any(type(count) is int and count > 1 for count in counts) or any(map(names_experts, nested))


def no_accelerator(name: str, way: str = "choose --target cpu") -> UnsupportedModelError:
    """Return the error for a mixture that an accelerator shall compute; `way` says what to do."""
    return UnsupportedModelError(f"{name} is a mixture of experts, which CPUs alone compute for now; {way}")


def _width(node: Node, dim: int = -1) -> int:
    return int(node.meta["val"].shape[dim])


def config_facts(config: Any) -> GraphFacts:
    """Return what a config object of transformers says of these facts, 0 where it says nothing."""
    text = text_config(config)

    def number(*names: str) -> int:
        values = (getattr(part, name, None) for part in (config, text) for name in names)
        return next((value for value in values if type(value) is int and value > 0), 0)

    hidden, heads = number(*_WIDTHS), number(*_HEADS)
    positions = number(*_POSITIONS)
    # A config that names no limit has none.
    longest = max(positions, rope_reach(config) or 0) if positions else 0
    return GraphFacts(
        hidden=hidden,
        layers=number(*_LAYERS),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or hidden // max(1, heads),
        ffn=number("intermediate_size", "ffn_dim", "ffn_hidden_size"),
        vocab=number("vocab_size"),
        activation="identity",
        positions=min(filter(None, (longest, text_limit(config))), default=None),
    )


def with_graph(facts: ModelFacts, found: GraphFacts) -> ModelFacts:
    """Return `facts` with those that the graph shows."""
    values: Mapping[str, Any] = {name: value for name, value in vars(found).items() if name != "positions"}
    longest = facts.max_positions if found.positions is None else min(facts.max_positions, found.positions)
    return replace(facts, **values, max_positions=longest)


def positions_of(found: GraphFacts) -> int:
    """Return the longest text of a model, or a usual length where nothing bounds it."""
    return found.positions or _MOST_POSITIONS
