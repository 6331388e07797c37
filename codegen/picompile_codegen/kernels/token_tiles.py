"""The tokens of a chunk, a few at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from picompile_codegen.kernels.tensor import Expr, bind, loop, minimum


@contextmanager
def token_tiles(tokens: Expr, together: int) -> Iterator[list[Expr]]:
    """`with token_tiles(n, 4) as tile:` for every four of n tokens.

    In the last tile the last token stands in for those past the end, and is computed again.
    """
    with loop(0, (tokens + (together - 1)) // together) as tile:
        yield [bind(minimum(tile * together + i, tokens - 1)) for i in range(together)]
