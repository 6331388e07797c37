"""Specs of attention, of extending the KV cache, and of lending a cache of the host to an accelerator."""

from collections.abc import Iterator
from dataclasses import dataclass

from picompile_codegen.errors import CodegenError
from picompile_codegen.specs.arguments import (
    SCRATCH,
    CacheArgument,
    Declaration,
    KernelArgument,
    KernelSpec,
    StepSpec,
    flag,
    floats,
    floats_out,
    optional_floats,
    symbol,
)
from picompile_codegen.specs.tokens import angles


@dataclass(frozen=True)
class CacheWriteSpec(StepSpec):
    """cache[slot, h, position] = x[t, h] for each row t, whose position and slot are those of `mode`.

    x float32 [rows, kv_heads · d], cache kv_dtype [sequences, kv_heads, context, d].
    """

    named = "cache_write_{kv_dtype}_{kv_heads}x{head_dim}_{step_name}_c{context}_s{sequences}"
    op = "cache"

    kv_heads: int
    head_dim: int
    kv_dtype: str

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.kv_heads * self.head_dim)
        yield CacheArgument("cache", self.kv_dtype, self.sequences, self.kv_heads, self.context, dim=self.head_dim)
        yield from self.step_arguments()


@dataclass(frozen=True)
class AttentionSpec(StepSpec):
    """softmax(q · kᵀ · scale) · v for each query head, over the cached positions that a token may see.

    A row at position p sees positions max(0, p - window + 1) … p of its sequence, or all up to p when `window` is 0.
    q float32 [rows, heads · head_dim], k_cache and v_cache of head_dim and value_dim → y float32
    [rows, heads · value_dim].

    With `extend`, k float32 [rows, kv_heads · head_dim] and v float32 [rows, kv_heads · value_dim] are first written to
    the caches; with `turn` as well, q and k are turned by cos and sin (see `RotarySpec`) before.

    A `softcap` above 0 turns scores s into softcap · tanh(s / softcap). After that, `slopes` float32 [heads] add
    slopes[head] · (i - p) to the score of position i. `sinks` float32 [heads] are scores of one more key of each head,
    whose value is 0.

    Raises:
        CodegenError: For a chunk that is to extend the caches: `CacheWriteSpec` does that before.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    kv_dtype: str
    scale: float
    window: int
    extend: bool = False
    turn: bool = False
    softcap: float = 0.0
    slopes: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.mode == "chunk" and self.extend:
            raise CodegenError(f"kernel {self.name}: chunks do not extend caches; use cache_write before")

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}v{self.value_dim}"
        return symbol(
            "attention",
            self.kv_dtype,
            f"{self.heads}h{self.kv_heads}x{dims}",
            self.step_name,
            f"c{self.context}",
            f"s{self.sequences}",
            self.scale,
            f"w{self.window}" if self.window else "",
            "extend" if self.extend else "",
            "turn" if self.turn else "",
            f"cap{self.softcap}" if self.softcap else "",
            "slopes" if self.slopes else "",
            "sinks" if self.sinks else "",
        )

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def query_scale(self) -> float:
        """The factor of queries. With a soft cap it includes the division by that."""
        return self.scale / self.softcap if self.softcap else self.scale

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        cache = (self.kv_dtype, self.sequences, self.kv_heads, self.context)
        yield floats("q", self.rows, self.heads * self.head_dim)
        if self.extend:
            yield floats("k", self.rows, self.kv_heads * self.head_dim)
            yield floats("v", self.rows, self.kv_heads * self.value_dim)
        if self.turn:
            yield from angles(self.context, self.head_dim)
        yield from optional_floats((("slopes", self.heads, self.slopes), ("sinks", self.heads, self.sinks)))
        yield CacheArgument("k_cache", *cache, self.head_dim)
        yield CacheArgument("v_cache", *cache, self.value_dim)
        yield floats_out("y", self.rows, self.heads * self.value_dim)
        yield SCRATCH
        yield from self.step_arguments()


@dataclass(frozen=True)
class LendCacheSpec(KernelSpec):
    """y[h, p] = cache[slot, h, p] for all positions p before those of this step. Only the host has this kernel.

    cache `dtype` [sequences, kv_heads, context · width] → y `dtype` [kv_heads, context · width], which is shared.
    `width` is that of a row of keys, of values or of their scales.
    """

    named = "lend_cache_{dtype}_{kv_heads}x{width}_c{context}_s{sequences}"
    op = "cache"

    kv_heads: int
    width: int
    dtype: str
    context: int
    sequences: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        shape = (self.kv_heads, self.context * self.width)
        yield KernelArgument("cache", self.dtype, (self.sequences, *shape), "state")
        yield KernelArgument("y", self.dtype, shape, "out")


@dataclass(frozen=True)
class BorrowCacheSpec(KernelSpec):
    """y[h, p] = source[h, p] for all positions p before those of this step, once the flag is set.

    source `dtype` [kv_heads, context · width], shared → y like source. What y has of later positions is undefined.
    """

    named = "borrow_cache_{dtype}_{kv_heads}x{width}_c{context}"
    op = "receive"

    kv_heads: int
    width: int
    dtype: str
    context: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        shape = (self.kv_heads, self.context * self.width)
        yield KernelArgument("source", self.dtype, shape)
        yield flag("awaits")
        yield flag("abandons", "abandoned")
        yield KernelArgument("y", self.dtype, shape, "out")
