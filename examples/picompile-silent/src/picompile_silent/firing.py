"""Counts how often each neuron fires on a text, in eager PyTorch.

A graph runs at every stage. After `insert-predictors` the operator `predict` says for each token which neurons fire;
kind `exact` computes that from the gate itself.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from picompile import Captured
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import is_call
from picompile_passes.graph.operands import PREDICT
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.pipeline import Pipeline
from picompile_silent.counts_file import Counts


class FiringCounter(Interpreter):
    """Runs a graph of stage predicted, node by node; `counts` has int64 [neurons] for each layer."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.counts: dict[int, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """Computes `n`; where it is a mask, bool [tokens, neurons], adds it up."""
        value = super().run_node(n)
        if is_call(n, PREDICT):
            layer = n.meta["layer"]
            self.counts[layer] = self.counts.get(layer, 0) + value.sum(0)
        return value


def count_firings(captured: Captured, texts: Sequence[Sequence[int]], window: int) -> Counts:
    """How often each neuron of each layer fires on `texts`, lists of token ids, each read in windows of its own.

    All weights are in memory, as float32. Raises `UnsupportedGraphError` for a model whose neurons are never silent.
    """
    predicted = Pipeline((*CANONICALIZE, InsertPredictors("exact")))(captured.graph_module).graph_module
    counter = FiringCounter(materialize(predicted, captured.weights))
    with torch.no_grad():
        for tokens in windows(texts, window):
            counter.run(tokens, torch.arange(len(tokens)))
    return {layer: counts.tolist() for layer, counts in counter.counts.items()}


def windows(texts: Sequence[Sequence[int]], window: int) -> Iterator[Tensor]:
    """The tokens of each text in pieces of `window`, int64 [window] or fewer at its end."""
    for ids in texts:
        for start in range(0, len(ids), window):
            yield torch.tensor(ids[start : start + window])


def read_texts(model: Path, files: Sequence[Path], tokens: int | None) -> list[list[int]]:
    """The token ids of each file by the model's own tokenizer; no more than `tokens` in all."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    left, texts = tokens, []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")).ids[:left]
        left = None if left is None else left - len(ids)
        texts.append(ids)
    return texts
