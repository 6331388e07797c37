"""A captured model, and the facts about it that an artifact's manifest repeats."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from picompile_passes.graph.materialize import WeightSource


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model.

    `architecture` is the class that transformers (or the module itself) has for it, `family` ours. `ffn` counts the
    neurons of a feed-forward block. `activation` is the text form of the dialect; with a gate matrix, it is the gate's.
    `parameters` counts every weight once, tied ones included once. `checkpoint_dtype` is `f32`, `f16` or `bf16`.
    """

    name: str
    architecture: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: str
    max_positions: int
    parameters: int
    checkpoint_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """A model: its graph at stage captured, where its weights are, and what it is.

    The graph is forward(tokens int64 [T], positions int64 [T]) → logits float32 [T, V]. Its parameters are on the meta
    device, under the names that `weights` knows. Of layers that compute the same it may have two alone: `canonicalize`
    repeats them, and `materialize` refuses the graph before. `warnings` are lines for the user: what of a config.json
    or of the files has no effect.
    `prove` compares the graph with the model's own computation, and raises `UnsupportedModelError` where they differ;
    it is None for a module in memory.
    """

    graph_module: GraphModule
    weights: WeightSource
    facts: ModelFacts
    warnings: tuple[str, ...] = ()
    prove: Callable[[], None] | None = None
