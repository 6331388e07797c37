"""How long a GPU takes to read a prompt by a plan, before the first token of the answer.

A chunk of tokens goes through all layers on the GPU. Cold neurons and projections of layers whose attention is with the
host come over the bus meanwhile, once for each chunk, while the layers before are multiplied; so a chunk takes about as
long as the slower of both, and a few percent more, since two staging buffers cannot hide everything. Caches of the host
come as well, as far as they are filled, and new keys and values go back: the GPU waits for these, and the bus carries
nothing else meanwhile. Attention between tokens and the head, which only the last token needs, are left out: at 1,500
tokens they are a few percent, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from picompile.errors import UsageError
from picompile.machine.targets import LOCAL, Target
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.plan import Plan
from picompile_codegen.lowering.slices import STAGING_BYTES

# Tokens of the answer by which a plan is judged together with a prompt: PowerInfer's paper answers with up to 256.
ANSWER_TOKENS = 256
# Copies from pinned memory reach 25 of the 31.5 GB/s of PCIe 4.0 x16.
PCIE_EFFICIENCY = 0.8
# An assumption: of the tensor cores' peak. Kernels have the instructions for more, though not where tensor cores are
# fast: an A100 takes a quarter of the time for a multiplication, an H100 an eighth, which `mma` alone cannot reach.
TENSOR_EFFICIENCY = 0.5
_OF_FAST_ONES = {"sm_80": 0.4, "sm_90": 0.25}
# Layers of a graph of launches (`picompile_runtime`), whose first copy nothing hides.
_GRAPH_LAYERS = 8
# Keys and values go back as float32, for each byte of a cache in float16 two. For a q8 cache, which the plan does not
# tell apart, it would be 3.8, for one in float32 one.
_SENT_FOR_CACHED = 2
# What dense inference copies of a layer that is not on the GPU, and how many tokens share it, as in llama.cpp.
_DENSE_CHUNK = 512


@dataclass(frozen=True)
class PromptEstimate:
    """The predicted time of a prompt of `tokens` tokens, in `chunks`.

    `copied_bytes` are the weights that come over the bus for each chunk, `cache_bytes` what of the host's caches comes
    and goes back in all chunks. `copy_s`, `arithmetic_s` and `cache_s` are of all chunks, too. `total_s` is the time to
    the first token, `dense_s` that of dense inference with layers on the GPU as far as they fit.
    """

    tokens: int
    chunks: int
    copied_bytes: int
    cache_bytes: int
    copy_s: float
    arithmetic_s: float
    cache_s: float
    total_s: float
    dense_s: float

    def to_json(self) -> Mapping[str, Any]:
        """Return the form in the JSON of `picompile plan`."""
        return vars(self)


def unknown_about_prompts(plan: Plan, target: Target) -> str:
    """Return why the time of a prompt cannot be predicted, an empty text if it can."""
    if not plan.taken_bytes("accelerator"):
        return "prompts would be read on the host, whose speed at them is not known"
    return "" if target.tensor_flops_per_s else f"the speed of the tensor cores of target {target.name} is not known"


def prompt_estimate(model: ModelBytes, plan: Plan, target: Target, tokens: int, chunk: int) -> PromptEstimate:
    """Return the estimate for a prompt of `tokens` tokens that are read `chunk` at a time.

    Raises:
        UsageError: the prompt is longer than the context, or `unknown_about_prompts` says something.
    """
    if tokens > plan.context:
        raise UsageError(f"--prompt: {tokens} tokens are more than the context, {plan.context}")
    if unknown := unknown_about_prompts(plan, target):
        raise UsageError(f"--prompt: {unknown}")
    sizes = [_copied_bytes(model, plan, number) for number in range(len(plan.layers))]
    chunks = -(-tokens // chunk)
    # That of this machine was measured by such copies.
    bus = plan.machine.pcie_bytes_per_s * (1.0 if target.name == LOCAL else PCIE_EFFICIENCY)
    copy_s = chunks * sum(sizes) / bus
    # What little hides: the first slice of each graph.
    graphs = range(0, len(sizes), _GRAPH_LAYERS)
    first_s = chunks * sum(min(STAGING_BYTES, sizes[start]) for start in graphs) / bus
    reached = target.tensor_flops_per_s * _OF_FAST_ONES.get(target.architecture, TENSOR_EFFICIENCY)
    arithmetic_s = 2 * _layer_parameters(model) * tokens / reached
    dense_s = -(-tokens // _DENSE_CHUNK) * _dense_left_bytes(model, plan) / bus
    cache_bytes = _cache_bytes(model, plan, tokens, chunk)
    cache_s = cache_bytes / bus
    total_s = max(copy_s, arithmetic_s) + cache_s + first_s
    return PromptEstimate(
        tokens,
        chunks,
        copied_bytes=sum(sizes),
        cache_bytes=cache_bytes,
        copy_s=copy_s,
        arithmetic_s=arithmetic_s,
        cache_s=cache_s,
        total_s=total_s,
        dense_s=max(dense_s, arithmetic_s),
    )


def gain_with_answer(plan: Plan, prompt: PromptEstimate) -> float | None:
    """Return how many times as fast as dense inference a prompt and an answer of `ANSWER_TOKENS` are; None if dense
    inference does not fit."""
    if not plan.baselines:
        return None
    dense_s = prompt.dense_s + ANSWER_TOKENS * plan.sequences / max(plan.baselines.values())
    return dense_s / (prompt.total_s + ANSWER_TOKENS * plan.token_s)


def _copied_bytes(model: ModelBytes, plan: Plan, number: int) -> int:
    """Return the bytes of a layer's weights that are on the host: of neurons, and of attention if it is."""
    placed, layer = plan.layers[number], model.layers[number]
    of_attention = layer.attention_bytes if placed.attention == "host" else 0
    return (placed.neurons - placed.hot_neurons) * layer.neuron_bytes + of_attention


def _cache_bytes(model: ModelBytes, plan: Plan, tokens: int, chunk: int) -> int:
    """Return the bytes of the host's caches that cross the bus for a prompt.

    For each chunk those of all positions before it come, and the keys and values of its own go back.
    """
    of_position = sum(
        layer.kv_cache_bytes / model.sequences / model.context
        for placed, layer in zip(plan.layers, model.layers, strict=True)
        if placed.kv_cache == "host"
    )
    before = sum(range(0, tokens, chunk))
    return round(of_position * (before + _SENT_FOR_CACHED * tokens))


def _weight_bytes(model: ModelBytes) -> int:
    """Return the bytes of all layers without predictors."""
    return sum(
        layer.attention_bytes + layer.shared_bytes + layer.neurons * layer.neuron_bytes for layer in model.layers
    )


def _layer_parameters(model: ModelBytes) -> float:
    """Return the parameters of all layers: their share of all by bytes, since all matrices have one format."""
    everything = _weight_bytes(model) + model.embedding_bytes + model.head_bytes
    return model.parameters * _weight_bytes(model) / everything


def _dense_left_bytes(model: ModelBytes, plan: Plan) -> int:
    """Return the bytes of layers that the GPU cannot hold in dense inference."""
    caches = sum(layer.kv_cache_bytes for layer in model.layers)
    needed = _weight_bytes(model) + model.head_bytes + caches + model.workspace_bytes + model.table_bytes
    return max(0, needed - plan.machine.gpu_bytes)
