"""The proof of a capture: captured and canonical graph give the logits of the model's own eager forward.

A name in a config.json proves nothing, and neither does a graph that passes every rule. So each compilation compares
what it captured with transformers' own computation: on random weights and random tokens, in float32, for two lengths.
The model is made small for it, without a change of what a layer computes: as few layers as show every kind, fewer
neurons, a smaller vocabulary and narrower windows. Raising reads from the first positions what depends on positions, so
the two graphs are compared with each other at the last positions too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from picompile.errors import PicompileError, UnsupportedModelError
from picompile.frontend.build import WINDOWS, build_model, call_model, capture_model
from picompile.frontend.config import make_config, quiet_transformers
from picompile.frontend.experts import EXPERTS_NAME
from picompile.frontend.export import first_names
from picompile.frontend.families import Family, text_limit
from picompile.frontend.messages import one_line
from picompile.frontend.weight_sources import ModuleWeights
from picompile_passes.errors import PassesError
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import arguments, calls, constant_nodes, is_call
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize import CANONICALIZE, canonical_form, canonicalize
from picompile_passes.passes.canonicalize.forms import most_tokens

_aten = torch.ops.aten

# Logits may differ by this much of their largest. Sums in another order differ by less than a tenth of it.
TOLERANCE = 1e-4
# The longer of the two goes past the windows of the small model.
_LENGTHS = (3, 19)
_SMALL = {
    **dict.fromkeys(WINDOWS, 7),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim"), 96),
    "intermediate_size_mlp": 96,
    # Neurons of an expert. The number of experts stays, since a router's rule depends on it.
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    "vocab_size": 256,
    # Tokens that stand for an image or a sound, which no text has: they are beyond the tokens that are drawn.
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id", "audio_token_id"), 255),
    # Tokens that a smaller vocabulary need not have.
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
# The frequencies of a rotary embedding may be fitted, and then tables differ by more at the last positions.
_FAR_TOLERANCE = 1e-3
# Operators with which a model counts its tokens.
_COUNTING = (
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    *(_aten.cumsum.default, _aten.ones.default, _aten.full.default),
)
# Sizes and constants that tell one kind of layer from another.
_TOLD_APART = ("heads", "kv_heads", "groups", "inverse_frequency", "chosen", "chosen_groups")
# Its float32 weights, and copies of them, shall fit the memory of most machines.
_MOST_PARAMETERS = 1_500_000_000
# FATReLU jumps: a rounding may bring a value to the other side. It does not for three sets of weights in turn.
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class _Subject:
    """A model that is compared: transformers' own, and its captured graph, both with the same weights."""

    eager: nn.Module
    captured: GraphModule
    weights: ModuleWeights
    vocab: int

    @cached_property
    def canonical(self) -> GraphModule:
        """Return the canonical graph; a pass that cannot raise the captured one raises here."""
        return canonicalize(self.captured)


def prove(raw: Mapping[str, Any], family: Family, activation: str | None, captured: GraphModule) -> None:
    """Compare the model that a config.json of the contents `raw` describes with its graphs.

    `captured` is the graph of the whole model, which says what kinds of layers there are. Raises
    `UnsupportedModelError`, with the first operator that differs, where the logits are not equal within `TOLERANCE`,
    and what capturing and raising raise.
    """
    whole = _layers(canonical_form(captured))
    for seed in _SEEDS:
        try:
            difference = _difference(_subject(raw, family, activation, whole, seed), seed)
        except (PassesError, PicompileError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"the model cannot be compared with eager PyTorch: {one_line(error)}"
            ) from error
        if difference is None:
            return
    raise UnsupportedModelError(
        f"the captured graph does not compute what transformers' {family.model_class.partition(':')[2]} computes: "
        f"{difference}; this is a fault of picompile, please report it"
    )


def _subject(raw: Mapping[str, Any], family: Family, activation: str | None, whole: "_Layers", seed: int) -> _Subject:
    """Return the smallest model that has every kind of layer that the whole one has."""
    count = len(whole.kinds)
    kept = max(2, max(whole.kinds.index(kind) for kind in whole.kinds) + 1)
    for shrunk in (_SMALL, dict.fromkeys(WINDOWS, 7), {}):
        try:
            subject = _made(_smaller(raw, count, kept, shrunk), family, activation, seed)
        except Exception:
            # What a model needs of a config differs; the next one is closer to the original.
            continue
        if _layers(subject.canonical) == _Layers(whole.kinds[:kept], whole.end):
            return subject
    return _made(raw, family, activation, seed)


def _smaller(raw: Mapping[str, Any], layers: int, kept: int, shrunk: Mapping[str, int]) -> dict[str, Any]:
    """Return a config of the first `kept` layers, whose fields in `shrunk` are no greater than there."""
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict) and key.endswith("_config"):
            values[key] = _smaller(value, layers, kept, shrunk)
        elif key in _LAYER_COUNTS and value == layers:
            values[key] = min(kept, layers)
        elif isinstance(value, list) and _is_of_layers(value, layers):
            values[key] = value[: kept * len(value) // layers]
        elif key in shrunk and type(value) is int:
            values[key] = min(value, shrunk[key])
        else:
            values[key] = value
    return values


def _is_of_layers(entries: list[Any], layers: int) -> bool:
    """Return whether a list has an entry for each layer; or several, where blocks are layers of their own by name."""
    names_blocks = bool(entries) and all(isinstance(entry, str) for entry in entries)
    return len(entries) == layers or (names_blocks and len(entries) % layers == 0)


def _made(raw: Mapping[str, Any], family: Family, activation: str | None, seed: int) -> _Subject:
    def build(attention: str | None, experts: str = EXPERTS_NAME) -> nn.Module:
        return build_model(family, make_config(family, raw), activation, attention, experts)

    model = build(None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > _MOST_PARAMETERS:
        raise UnsupportedModelError(
            f"the model cannot be compared with eager PyTorch: no smaller one of its kind can be made, and it has "
            f"{parameters:,} parameters"
        )
    captured = capture_model(model, build, whole=True)
    eager = build("eager", "eager")
    _fill(eager, seed)
    weights = ModuleWeights({name: eager.get_parameter(name) for name in first_names(eager)})
    embedding = eager.get_input_embeddings()  # type: ignore[operator]
    return _Subject(eager, captured, weights, int(embedding.weight.shape[0]))


def _fill(model: nn.Module, seed: int) -> None:
    """Give every parameter random values, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                value = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    value *= parameter.shape[-1] ** -0.5 if not isinstance(module, nn.Embedding) else 1.0
                else:
                    value = _near(parameter, value)
                made[id(parameter)] = nn.Parameter(value, requires_grad=False)
            setattr(module, name, made[id(parameter)])


def _near(parameter: Tensor, noise: Tensor) -> Tensor:
    """Return a vector near what its parameter begins as, where that is known: a norm's weight is near 1, or near 0."""
    begin = torch.ones(()) if parameter.is_meta else parameter.detach().float()
    return begin + 0.2 * noise


def _difference(subject: _Subject, seed: int) -> str | None:
    """Return what differs and where, None where all logits are equal."""
    generator = torch.Generator().manual_seed(seed + 1)
    compared = 0
    limits = (most_tokens(subject.captured), text_limit(vars(subject.eager)["config"]))
    for length in sorted({min(filter(None, (length, *limits))) for length in _LENGTHS}):
        tokens = torch.randint(min(subject.vocab, 200), (length,), generator=generator)
        with torch.no_grad(), quiet_transformers():
            expected = call_model(subject.eager, tokens.unsqueeze(0), torch.arange(length).unsqueeze(0))[0]
        if not bool(torch.isfinite(expected).all()):
            continue
        compared += 1
        _check_positions(subject, tokens, expected)
        graph_module = subject.captured
        if not _close(_logits(materialize(graph_module, subject.weights), tokens), expected):
            return _first_module(subject, tokens)
        if not _close(_logits(materialize(subject.canonical, subject.weights), tokens), expected):
            return _first_pass(subject, tokens, expected)
    if not compared:
        raise UnsupportedModelError("eager PyTorch makes logits of random weights that are not finite")
    return _far_difference(subject, tokens)


def _check_positions(subject: _Subject, tokens: Tensor, expected: Tensor) -> None:
    """Refuse a model that counts positions otherwise where it is given none, as RoBERTa does: it has two answers."""
    try:
        with torch.no_grad(), quiet_transformers():
            plain = call_model(subject.eager, tokens.unsqueeze(0), None)[0]
    except Exception:
        # Without a padding token RoBERTa cannot count.
        plain = None
    if not _close(plain, expected):
        raise UnsupportedModelError(
            f"{type(subject.eager).__name__} counts positions from its padding token on where it is given none, and "
            "transformers' generate gives it 0, 1, 2 …: it has two answers, which is not supported"
        )


def _far_difference(subject: _Subject, tokens: Tensor) -> str | None:
    """Return where the canonical graph differs from the captured one at the last positions, None where it does not."""
    most = most_tokens(subject.captured)
    # A model that counts its tokens itself, as some do for masks, computes the same whatever its positions.
    if most is None or most < 2 * len(tokens) or any(calls(subject.captured.graph, *_COUNTING)):
        return None
    positions = torch.arange(most - len(tokens), most)
    graphs = (materialize(graph, subject.weights) for graph in (subject.captured, subject.canonical))
    with torch.no_grad():
        expected, found = (graph(tokens, positions) for graph in graphs)
    if not bool(torch.isfinite(expected).all()) or _close(found, expected, _FAR_TOLERANCE):
        return None
    return f"at the positions {most - len(tokens)} to {most - 1} the canonical graph has other logits"


def _first_pass(subject: _Subject, tokens: Tensor, expected: Tensor) -> str:
    """Return the first pass after which the logits are others, and the node that it changed."""
    graph_module = subject.captured
    for pass_ in CANONICALIZE:
        before, graph_module = graph_module, pass_(graph_module).graph_module
        real = materialize(graph_module, subject.weights)
        if not _close(_logits(real, tokens), expected):
            node = _first_node(materialize(before, subject.weights), real, tokens)
            return f"pass {pass_.name} changed {node} for {len(tokens)} tokens"
    return "the passes together change the logits"


def _logits(graph_module: GraphModule, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = graph_module(tokens, torch.arange(len(tokens)))
    return logits


def _close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    if not isinstance(found, Tensor) or found.numel() != expected.numel():
        return False
    bound = tolerance * max(1.0, float(expected.abs().max()))
    return float((found.flatten() - expected.flatten()).abs().max()) <= bound


def _first_node(before: GraphModule, after: GraphModule, tokens: Tensor) -> str:
    """Return the first node of `after` that has another value than the one node of `before` that it stands for."""
    old, new = node_values(before, tokens), node_values(after, tokens)
    for node in after.graph.nodes:
        made = node.meta.get("from")
        sources = [old[name] for name in made.sources if name in old] if made is not None else []
        same = [value for value in sources if isinstance(value, Tensor) and value.shape == _shape(new[node.name])]
        if same and not _close(new[node.name], same[0]):
            return f"{node.name} ({node.target})"
    return "the logits"


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _first_module(subject: _Subject, tokens: Tensor) -> str:
    """Return the first module whose result the captured graph has otherwise, with the node that should be it."""
    own = dict(_module_results(subject.eager, tokens))
    values = node_values(materialize(subject.captured, subject.weights), tokens)
    last: dict[str, Node] = {}
    for node in subject.captured.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            last[path.removeprefix("L['self'].").removeprefix("decoder.")] = node
    for path, results in own.items():
        node = last.get(path)
        if node is None or _shape(values[node.name]) is None:
            continue
        # The last node of a module may make any of its results: rotary embeddings give cosines and sines.
        if not any(_close(values[node.name], expected) for expected in results):
            return f"{path} gives another result, which is {node.name} ({node.target}) in the graph"
    return "the logits are others"


def _module_results(model: nn.Module, tokens: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the modules of a model in the order in which they finish, with their results."""
    found: list[tuple[str, list[Tensor]]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, result: Any) -> None:
            results = result if isinstance(result, (tuple, list)) else (result,)
            tensors = [each for each in results if isinstance(each, Tensor)]
            if tensors:
                found.append((path, tensors))

        return hook

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules() if path]
    try:
        with torch.no_grad(), quiet_transformers():
            call_model(model, tokens.unsqueeze(0), torch.arange(len(tokens)).unsqueeze(0))
    finally:
        for handle in handles:
            handle.remove()
    yield from found


@dataclass(frozen=True)
class _Layers:
    """The operators of each layer, between one attention and the next, and those behind the last one."""

    kinds: tuple[Any, ...]
    end: tuple[Any, ...]


def _layers(graph_module: GraphModule) -> _Layers:
    """Return what each layer computes, without sizes. The first has the embedding, the end has the last block."""
    constant = constant_nodes(graph_module.graph)
    kinds: list[Any] = []
    kind: list[Any] = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node in constant:
            continue
        kind.append(_kind(node))
        if is_call(node, ATTENTION):
            kinds.append(tuple(kind))
            kind = []
    return _Layers(tuple(kinds), tuple(kind))


def _kind(node: Node) -> Any:
    """Return the operator of a node and its options; whether it has a window, but not how wide."""
    values = arguments(node)
    options = {
        name: str(value) if isinstance(value, Node) else value
        for name, value in values.items()
        if isinstance(value, (str, bool, float)) or name in _TOLD_APART
    }
    missing = tuple(name for name, value in values.items() if value is None)
    return node.target, tuple(sorted(options.items())), missing, bool(values.get("window", 0))
