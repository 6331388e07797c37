"""Capturing any decoder that is a `torch.nn.Module`."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.export import DecoderCall, export_decoder, first_names
from picompile.frontend.facts import graph_facts
from picompile.frontend.weight_sources import ModuleWeights

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# What an argument with the positions [1, T] is called by the modules we know.
_POSITION_NAMES = ("positions", "position_ids", "pos", "input_pos")


def capture_module(
    module: nn.Module,
    *,
    name: str | None = None,
    call: DecoderCall | None = None,
    max_positions: int = 2048,
    bos_token_id: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Captured:
    """Return a decoder, captured: logits [1, T, vocabulary] of tokens int64 [1, T], for T up to `max_positions`.

    `call(module, tokens, positions)` says how to call it; by default it is given the tokens and, if it has an argument
    for them, the positions. It must attend causally through `F.scaled_dot_product_attention`, and see a token's
    position only in position tables and rotary embeddings. The module stays as it is; its weights are read from it when
    they are needed.

    Raises `UnsupportedModelError` where the module cannot be captured or is no decoder, `UnsupportedGraphError` where
    the dialect cannot express it.
    """
    if max_positions < 1:
        raise UsageError(f"max_positions must be at least 1, not {max_positions}")
    graph_module = export_decoder(module, call or _default_call(module), max_positions)
    parameters = {first: module.get_parameter(first) for first in first_names(module)}
    facts = _facts(
        module, name, graph_module, parameters, max_positions, bos_token_id, eos_token_ids=tuple(eos_token_ids)
    )
    return Captured(graph_module, ModuleWeights(parameters), facts)


def _default_call(module: nn.Module) -> DecoderCall:
    accepted = inspect.signature(module.forward).parameters
    named = next((name for name in _POSITION_NAMES if name in accepted), None)

    def call(module: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        result = module(tokens) if named is None else module(tokens, **{named: positions})
        result = getattr(result, "logits", result)
        logits = result[0] if isinstance(result, (tuple, list)) else result
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise UnsupportedModelError(f"{type(module).__name__} gives back no logits [batch, tokens, vocabulary]")
        return logits

    return call


def _facts(
    module: nn.Module,
    name: str | None,
    graph_module: GraphModule,
    parameters: Mapping[str, Tensor],
    max_positions: int,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> ModelFacts:
    found = graph_facts(graph_module, type(module).__name__)
    sizes = dict.fromkeys(_DTYPES, 0)
    for parameter in parameters.values():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel() * parameter.element_size()
    return ModelFacts(
        name=name or type(module).__name__,
        architecture=type(module).__name__,
        family="module",
        **{name: value for name, value in vars(found).items() if name != "positions"},
        max_positions=max_positions if found.positions is None else min(max_positions, found.positions),
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        checkpoint_dtype=_DTYPES.get(max(sizes, key=lambda dtype: sizes[dtype]), "f32"),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )
