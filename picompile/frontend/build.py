"""Building a model of transformers without memory for its weights, but with the buffers that it computes."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from picompile.errors import UnsupportedModelError
from picompile.frontend.attention import ATTENTION_NAME, one_chunk, one_sequence, register_attention
from picompile.frontend.bamboo import FatReLU
from picompile.frontend.config import quiet_transformers, resolve
from picompile.frontend.experts import EXPERTS_NAME, keep_router_biases, register_experts
from picompile.frontend.export import export_decoder
from picompile.frontend.facts import config_facts
from picompile.frontend.families import GROWING_ROPE_TYPES, Family
from picompile.frontend.messages import one_line
from picompile.frontend.mixtures import replace_mixtures
from picompile.frontend.text_model import keep_text, own_config
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize.masks import MASK_TOKENS

# Rotary embeddings have no longest text of their own; this bounds the token count of the graph, not of the artifact.
_MAX_TOKENS = 1 << 20

# Names that transformers' feed-forward blocks have for their activation: Llama and its like, OPT, Falcon.
_ACTIVATION_MODULES = ("act_fn", "activation_fn", "act")

_SDPA = torch.ops.aten.scaled_dot_product_attention.default

# How models are asked to attend, in this order. Those that ask no registry attend in their own way.
_IMPLEMENTATIONS = (ATTENTION_NAME, "sdpa", "eager")

# Buffers of models that people use have less than a tenth of this: tables of positions, and masks of all pairs of them.
_MOST_BUFFER_ELEMENTS = 1 << 28

# Fields of configs with the width of a window.
WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "local_attention", "attention_chunk_size"),
    "sliding_window_size",
)

# What makes a tensor of a given shape.
_FACTORIES: frozenset[Any] = frozenset(
    {torch.empty, torch.ones, torch.zeros, torch.full, torch.rand, torch.randn, torch.randint, torch.eye, torch.arange}
)


class WithoutWeights(TorchFunctionMode):
    """A context in which uninitialized tensors are on the meta device, and all others have their values.

    Modules of torch make their parameters with `torch.empty`, and fill them later. Buffers are computed from numbers.
    So a model that is built in this context takes no memory for its matrices, and its buffers are right, whether or not
    a checkpoint has them.

    Raises `UnsupportedModelError` for a tensor of numbers that would take more than a gigabyte.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; `torch.empty` gets the meta device, and what fills a tensor there does nothing."""
        kwargs = dict(kwargs or {})
        filled = next(iter((*args, *kwargs.values())), None)
        if getattr(func, "__module__", "") == nn.init.__name__ and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        if func is torch.empty and kwargs.get("device") is None:
            return func(*args, **kwargs | {"device": "meta"})
        if func in _FACTORIES:
            _check_size(func, args, kwargs)
        return func(*args, **kwargs)


def _check_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.device("meta"), torch._C.DisableTorchFunctionSubclass():
        shape = func(*args, **{**kwargs, "device": "meta"}).shape
    if math.prod(shape) > _MOST_BUFFER_ELEMENTS and str(kwargs.get("device")) != "meta":
        raise UnsupportedModelError(
            f"config.json: the model computes a table of {' x '.join(map(str, shape))} numbers, which is not supported"
        )


def build_model(
    family: Family, config: Any, activation: str | None, attention: str | None = None, experts: str = EXPERTS_NAME
) -> nn.Module:
    """Return the model that `config` describes: matrices on the meta device, what it computes in memory.

    `activation` is the dialect's text, where the family knows it. The model attends by `attention`, or by the first of
    our ways that its class accepts, and computes its `experts` in ours, or in its own way: eager. Raises
    `UnsupportedModelError` where transformers rejects the config, or where the numbers that it computes are not finite.
    """
    register_attention()
    register_experts()
    model_class = resolve(family.model_class)
    attempts = _IMPLEMENTATIONS if attention is None else (attention,)
    # Falcon's way through torch's operator adds ALiBi without the scale that its own has.
    if attention is None and family.name == "falcon" and config.alibi:
        attempts = _IMPLEMENTATIONS[-1:]
    for implementation in attempts:
        try:
            with quiet_transformers(), WithoutWeights():
                model: nn.Module = model_class._from_config(
                    copy.deepcopy(own_config(model_class, config)),
                    attn_implementation=implementation,
                    experts_implementation=experts,
                    dtype=torch.float32,
                )
            break
        except UnsupportedModelError:
            raise
        except Exception as error:
            # Some classes know few ways to attend; what is wrong with a config is wrong with all of them.
            if implementation == attempts[-1]:
                raise UnsupportedModelError(f"config.json: {one_line(error)}") from error
    if activation is not None and activation.startswith("fatrelu"):
        threshold = float(activation.removeprefix("fatrelu(").removesuffix(")"))
        for module in model.modules():
            for name in _ACTIVATION_MODULES:
                if hasattr(module, name):
                    setattr(module, name, FatReLU(threshold))
    keep_text(model)
    keep_router_biases(model)
    if experts == EXPERTS_NAME:
        replace_mixtures(model)
    for module in model.modules():
        # Not every class takes this as an argument of its forward.
        own = getattr(module, "config", None)
        if own is not None and hasattr(own, "use_cache"):
            own.use_cache = False
    _check_numbers(model)
    return model.eval()


def _check_numbers(model: nn.Module) -> None:
    """Refuse rotary frequencies, and scales of them, that are no numbers."""
    for module in model.modules():
        scale = getattr(module, "attention_scaling", 1.0)
        numbers = [buffer for name, buffer in module.named_buffers(recurse=False) if "inv_freq" in name]
        finite = all(bool(torch.isfinite(buffer).all()) for buffer in numbers if not buffer.is_meta)
        if not finite or (isinstance(scale, (int, float)) and not math.isfinite(scale)):
            raise UnsupportedModelError(
                "config.json: rope_parameters make rotary frequencies that are no finite numbers"
            )


def capture_model(model: nn.Module, rebuild: Callable[[str], nn.Module], *, whole: bool = False) -> GraphModule:
    """Return the captured graph of a model of transformers; `whole` is as in `export_decoder`.

    A model that asks no registry for its attention computes it by itself, and must then be given a mask: `rebuild`
    makes the model once more, to attend in the way that it is told. Raises `UnsupportedModelError`.
    """
    config = vars(model)["config"]
    first = _IMPLEMENTATIONS.index(config._attn_implementation)
    # A table of positions is no longer than this.
    longest = config_facts(config).positions
    for implementation in _IMPLEMENTATIONS[first:]:
        if implementation == "sdpa" and not getattr(model, "_supports_sdpa", False):
            continue
        asked = model if implementation == _IMPLEMENTATIONS[first] else rebuild(implementation)
        _keep_short(asked)
        with quiet_transformers(), one_chunk():
            try:
                graph_module = export_decoder(asked, call_model, longest or _MAX_TOKENS, whole=whole)
            except UnsupportedModelError:
                if getattr(model, "_supports_attention_backend", False) or implementation == _IMPLEMENTATIONS[-1]:
                    raise
                continue
        # An attention of torch's own was given no mask unless it was asked for.
        operators = (ATTENTION,) if implementation == ATTENTION_NAME else (ATTENTION, _SDPA)
        if any(calls(graph_module.graph, *operators)):
            break
    if implementation != ATTENTION_NAME and (longest is None or longest >= MASK_TOKENS):
        _check_windows(config)
    return graph_module


def _check_windows(config: Any) -> None:
    """Refuse a window that is wider than what is read of the mask of a model that makes its own."""
    for name in WINDOWS:
        window = getattr(config, name, None)
        if type(window) is int and window >= MASK_TOKENS:
            raise UnsupportedModelError(
                f"config.json: {name} is {window}; a model that makes its own masks can have windows of at most "
                f"{MASK_TOKENS - 1} tokens"
            )


def _keep_short(model: nn.Module) -> None:
    """Make a model attend as it does in texts of at most `text_limit` tokens, whatever the length."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False  # type: ignore[assignment]
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            # One for each kind of layer.
            kept = {layers: "default" if kind in GROWING_ROPE_TYPES else kind for layers, kind in kinds.items()}
            module.rope_type = kept  # type: ignore[assignment]
        elif kinds in GROWING_ROPE_TYPES:
            module.rope_type = "default"  # type: ignore[assignment]
            _keep_scale(module)


def _keep_scale(module: Any) -> None:
    """Give rotary embeddings the scale that they have in short texts, where they ask the positions for it (PhiMoE)."""
    config, frequencies = module.config, getattr(module, "rope_init_fn", None)
    scale = config.rope_parameters.get("short_mscale")
    if scale is None or frequencies is None:
        return
    module.config = copy.copy(config)
    module.config.rope_parameters = {**config.rope_parameters, "rope_type": "default"}
    module.rope_init_fn = lambda _: (frequencies(config)[0], scale)


def call_model(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Return logits [1, T, V] of a transformers model for tokens and positions [1, T].

    Without positions the model counts them in its own way.
    """
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"position_ids": positions, "use_cache": False, "return_dict": True}
    with one_sequence():
        logits: Tensor = model(input_ids=tokens, **{name: options[name] for name in options if name in accepted}).logits
    return logits
