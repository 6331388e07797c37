"""The dense matrix-vector product of cuBLAS, through PyTorch: what sparse blocks are held against."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_WORKING_SET_BYTES = 2**28
_ROUNDS, _GRAPHS = 20, 7


def matrix_vector_seconds(rows: int, columns: int, matrices: int) -> float:
    """Seconds of `matrices` products of float16 [rows, columns] with a vector, one after another; nothing else.

    The weights take turns, and are several times the second-level cache. The faster of the two ways to ask for it,
    `mv` and `linear`; each is a graph of many products, so that launches do not count.
    """
    copies = max(2, -(-_WORKING_SET_BYTES // (2 * rows * columns))) + matrices
    weights = [torch.randn(rows, columns, device="cuda").mul_(columns**-0.5).half() for _ in range(copies)]
    x = torch.randn(columns, device="cuda").half()
    ways: tuple[Callable[[Tensor], Tensor], ...] = (lambda w: torch.mv(w, x), lambda w: functional.linear(x[None], w))
    return matrices * min(_seconds(way, weights) for way in ways)


def _seconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """The median time of one product."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * _ROUNDS:
            product(weight)
    times = []
    for _ in range(_GRAPHS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (_ROUNDS * len(weights)))
    return statistics.median(times[1:])
