"""Graphs as passes see them.

| module | holds |
| --- | --- |
| `nodes` | reading nodes: `calls`, `is_call`, `arguments`, `attribute`, `constant_nodes` |
| `operands` | the operators of the dialect by name, their matrices and dimensions |
| `rewriter` | changing a graph: `Rewriter`, `Provenance` |
| `builder` | building a graph by hand: `GraphBuilder` |
| `values` | fake tensors: what a node's value looks like, without data |
| `weight_source` | where values come from: `WeightSource`, `load_rows` |
| `packed_rows` | the rows of a packed matrix, read in runs |
| `materialize` | real weights in a graph: `materialize`, `evaluate_constant` |
| `dump`, `dump_reader` | the text of `--dump-ir`, written and read again |
| `source`, `reduce` | a graph as Python source, and made smaller: for reproducers |

This file imports nothing, so that `dump_reader` works without torch.
"""
