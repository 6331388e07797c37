"""Counts a token's launches on the GPU, on the CUDA kernels that lowering would make.

`count_launches` takes the lowered graph that bytes are counted on, where every part is on one device, and has the CUDA
twin of each kernel in `decode` written: that says how many launches it is. Nothing is compiled. What a layer needs more
where it has parts on both devices depends on the placement: `exchange_launches`. `tests/placement/test_launches.py`
holds both to graphs that are lowered for a GPU.

A package's predictor whose kernel has no CUDA twin, which cannot be compiled for a GPU, counts as one launch. Three
things are not counted: that OPT-350M's projection of embeddings crosses twice more; the further inputs of a step of
several sequences; that a hot part of such a step, where no mask is made, may add up fewer slices than the whole block.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from picompile.compile_options import MOST_SEQUENCES
from picompile.placement.model_bytes import LayerBytes, LayerLaunches

if TYPE_CHECKING:
    from picompile.placement.times import Where
    from picompile_codegen.lower import Lowered
    from picompile_codegen.program import Call

# The part of a layer that a call belongs to, as `Placement` of `picompile_codegen` places it.
_PARTS = {
    "norm": "attention",
    "linear": "attention",
    "add": "attention",
    "rotary": "kv_cache",
    "attention": "kv_cache",
    "predict": "predictor",
    "ffn": "hot",
}

# A kernel that sends and one that receives: both are in the time of an exchange (`Machine.crossing_s`).
CROSSING_LAUNCHES = 2
# Queries, keys and values go to a cache on the host, and what attention makes of them comes back.
_CACHE_LAUNCHES = 4


def count_launches(lowered: "Lowered", batch: int) -> tuple[tuple[LayerLaunches, ...], int]:
    """Count the launches of a token's calls, or of those of `batch` sequences together.

    Args:
        lowered: a graph lowered for the host alone.
        batch: sequences that are decoded together.

    Returns:
        Launches of each layer, and those of the head, with what makes the highest logits known to the host.
    """
    calls = lowered.program.functions["decode"]
    launches = _by_kernel(lowered, calls, batch)
    ends = _layer_ends(calls)
    first = next(place for place, call in enumerate(calls) if call.op == "attention")
    counts = [Counter[str]() for _ in range(len(ends) + 1)]
    for place, call in enumerate(calls):
        # Embeddings, and what is added to them before the first layer, are on the host.
        if call.op == "embedding" or (call.op == "add" and place < first):
            continue
        layer = sum(place > end for end in ends)
        counts[layer]["head" if layer == len(ends) else _PARTS[call.op]] += launches[call.kernel]
    layers = tuple(
        LayerLaunches(count["attention"], count["kv_cache"], count["predictor"], count["hot"]) for count in counts[:-1]
    )
    return layers, counts[-1]["head"] + _leading(lowered.program.vocab, batch)


def exchange_launches(layer: LayerBytes, where: "Where") -> tuple[int, int, int]:
    """Count the launches that a layer needs for having parts on both devices, with none, some and all neurons hot.

    They are made for every token, whether or not a cold neuron fires: what sends and receives, and the addition of the
    parts of a block, where that is on the GPU. A predictor is taken to read what the block reads.
    """
    masked_by_host = int(layer.predictor_bytes > 0 and not where.predictor_on_gpu)
    if not where.attention_on_gpu:
        # The block's input comes, and its mask where the host makes one; the result goes back.
        there = 2 + masked_by_host
        return 0, there, there
    cache = 0 if where.kv_cache_on_gpu else _CACHE_LAUNCHES
    # Input and mask go together, the result comes back, and is added to that of the hot neurons.
    none, some, every = 2, 3, 0
    if masked_by_host:
        # The input goes for the predictor even if no neuron is cold, and a mask comes for the hot ones.
        some, every = some + 1, 2
    return none + cache, some + cache, every + cache


def _by_kernel(lowered: "Lowered", calls: "Sequence[Call]", batch: int) -> dict[str, int]:
    """The launches of each kernel that `calls` name, by its name."""
    recipes = {kernel.name: recipe for recipe, kernel in lowered.built.items()}
    return {call.kernel: _twin_launches(*recipes[call.kernel], batch) for call in calls}


def _twin_launches(builder: Any, parameters: tuple[tuple[str, Hashable], ...], batch: int) -> int:
    from picompile_codegen.cuda.builders import CUDA_BUILDERS
    from picompile_codegen.retarget import kernel_of

    twin = CUDA_BUILDERS.get(builder)
    if twin is None:
        return 1
    # A plan may be of more sequences than an artifact can hold.
    batch = min(batch, MOST_SEQUENCES)
    if batch > 1:
        # What the function `batch` asks for instead.
        batched: Mapping[str, Hashable] = {"rows": batch, "sequences": batch, "mode": "batch"}
        parameters = tuple((name, batched.get(name, value)) for name, value in parameters)
    return len(kernel_of((twin, parameters)).grids)


def _leading(vocab: int, batch: int) -> int:
    from picompile_codegen import kernels

    return _twin_launches(kernels.leading_logits, (("rows", 1), ("vocab", vocab)), batch)


def _layer_ends(calls: "Sequence[Call]") -> list[int]:
    """The place of the last call of each layer: that of its block or its attention, and of the additions after it."""
    ends = [place for place, call in enumerate(calls) if call.op == "ffn"]
    ends[-1] = max(ends[-1], max(place for place, call in enumerate(calls) if call.op == "attention"))
    for number, end in enumerate(ends):
        while end + 1 < len(calls) and calls[end + 1].op == "add":
            end += 1
        ends[number] = end
    return ends
