"""A decoder module to a captured graph, through `torch.export`, without its weights."""

import copy
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from picompile.errors import UnsupportedModelError
from picompile.frontend.complex_numbers import remove_complex
from picompile.frontend.in_place import remove_writes, writes_in_place
from picompile.frontend.layer_kinds import LayerList, PassedLayers, find_layers, hollow
from picompile_passes.base import Stage, set_stage
from picompile_passes.graph.nodes import attribute, calls, has_real_data
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.graph.stamps import set_stamps
from picompile_passes.passes.canonicalize import raised_form
from picompile_passes.passes.canonicalize.stamp_layers import check_stamps

# How a module is called: (module, tokens [1, T], positions [1, T]) → logits [1, T, V].
DecoderCall = Callable[[nn.Module, Tensor, Tensor], Tensor]

_LOG = logging.getLogger(__name__)

_EXAMPLE_TOKENS = 8
_WRAPPED = "decoder"

# What torch.export says where a module branches on the number of tokens, as recurrent ones do.
_DEPENDS_ON_LENGTH = ("Constraints violated", "Specializations unexpectedly required")
# And where sizes, or which branch it takes, depend on what it computes.
_DEPENDS_ON_VALUES = ("unbacked symbol", "Could not guard on data-dependent")

# Checks that tracing leaves behind; they say nothing about values.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")


class _Unbatched(nn.Module):
    """forward(tokens [T], positions [T]) → logits [T, V] of a module that works on batches."""

    def __init__(self, decoder: nn.Module, call: DecoderCall) -> None:
        super().__init__()
        self.decoder = decoder
        self.call = call

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.call(self.decoder, tokens.unsqueeze(0), positions.unsqueeze(0)).squeeze(0)


def export_decoder(module: nn.Module, call: DecoderCall, max_tokens: int, *, whole: bool = False) -> GraphModule:
    """Return the captured graph of `module`, for 1 to `max_tokens` tokens.

    Of layers of one kind the graph has the first two, and the pass `stamp-layers` adds the others. With `whole`, and
    for a module of which it cannot be shown that its layers are of one kind, the graph has all.

    The module is not touched. Its parameters come out as float32 on the meta device, its buffers as they are. A tied
    parameter has the first of its names. Raises `UnsupportedModelError` where `torch.export` cannot follow the module.
    """
    layers = None if whole else find_layers(module)
    if layers is not None:
        try:
            graph_module = _export(module, call, max_tokens, layers)
            set_stamps(graph_module, layers.stamps)
            check_stamps(raised_form(graph_module))
            return graph_module
        except Exception as error:
            # Whatever cannot be shown, or is wrong with the model, the capture of all layers shows or says.
            _LOG.debug("all layers are captured: %s", error)
    return _export(module, call, max_tokens, None)


def _export(module: nn.Module, call: DecoderCall, max_tokens: int, layers: LayerList | None) -> GraphModule:
    """Return the captured graph of `module`, with the first layers alone where `layers` says that they show all."""
    tokens = torch.export.Dim("tokens", min=1, max=max(max_tokens, _EXAMPLE_TOKENS))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        wrapped = _Unbatched(_without_weights(module, layers), call).eval()
        example = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64)
        positions = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64)
        if layers is not None:
            found = list(wrapped.decoder.get_submodule(layers.name).children())
            # Buffers are real; torch.export takes care of them by itself.
            mode.allow_non_fake_inputs = True
            with torch.no_grad():
                PassedLayers(found, layers).check(lambda: wrapped(example, positions))
            mode.allow_non_fake_inputs = False
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # torch's own use of what it deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(
                wrapped,
                (example, positions),
                dynamic_shapes=({0: tokens}, {0: tokens}),
                strict=False,
                # A slice of a mask or a table guards against a length that is just the buffer's; it holds there too.
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            exported = program.module(check_guards=False)
            if writes_in_place(exported.graph) and not remove_writes(exported.graph):
                # Retraces all of it, which takes twice as long as the export itself.
                exported = program.run_decompositions({}).module(check_guards=False)
    except UnsupportedModelError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if any(sign in text for sign in _DEPENDS_ON_LENGTH):
            text = "what it computes depends on the number of tokens in other ways than attention does"
        elif any(sign in text for sign in _DEPENDS_ON_VALUES):
            text = "how much it computes depends on values that it computes, as with experts that it loops over"
        else:
            text += _place(error)
        raise UnsupportedModelError(f"{type(module).__name__} cannot be captured: {text}") from error
    return _plain_graph(exported, module)


def _place(error: Exception) -> str:
    """Return where a model of transformers ended with `error`, such as " (modeling_xlm.py:123)"; "" for others."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "modeling_" in frame.filename]
    return f" ({names[-1]})" if names else ""


def first_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the parameters of `module` by the first of their names, with the other names that tied ones have."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def _without_weights(module: nn.Module, layers: LayerList | None) -> nn.Module:
    """Return a copy with float32 parameters without data (in the active fake mode), and with the same buffers.

    Layers that are not captured have neither.
    """
    uncaptured = []
    if layers is not None:
        uncaptured = list(module.get_submodule(layers.name).children())[layers.captured :]
    memo: dict[int, object] = {id(layer): hollow(layer) for layer in uncaptured}
    left_out = {id(parameter) for layer in uncaptured for parameter in layer.parameters()}
    for parameter in module.parameters():
        if id(parameter) in left_out:
            continue
        empty = torch.empty(parameter.shape, dtype=torch.float32)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to(torch.float32) if buffer.is_floating_point() else buffer
    return copy.deepcopy(module, memo)


def _plain_graph(exported: GraphModule, module: nn.Module) -> GraphModule:
    """Return the graph with plain inputs and output, parameters on the meta device and under the module's own names."""
    graph = Graph()
    for node in list(exported.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _CHECKS:
            exported.graph.erase_node(node)
    remove_complex(exported.graph)
    result = graph.graph_copy(exported.graph, {})
    (logits,) = result if isinstance(result, (tuple, list)) else (result,)
    graph.output(logits)
    _number_layers(graph)
    parameters = {name: first for first, others in first_names(module).items() for name in (first, *others)}
    buffers = dict(module.named_buffers())
    root: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        name = str(node.target).removeprefix(f"{_WRAPPED}.")
        if name in parameters:
            name = parameters[name]
            tensor = torch.empty(module.get_parameter(name).shape, device="meta")
        else:
            tensor = buffers[name] if name in buffers else attribute(exported, str(node.target))
            tensor = _constant(name, tensor)
        node.target, root[name] = name, tensor
        node._rename(name.replace(".", "_"))
    graph.eliminate_dead_code()
    plain = GraphModule(root, graph)
    set_stage(plain, Stage.CAPTURED)
    return plain


def _number_layers(graph: Graph) -> None:
    """Number attentions in the order in which they run, whatever numbers the model's modules have."""
    position = [argument.name for argument in ATTENTION._schema.arguments].index("layer")
    for layer, node in enumerate(calls(graph, ATTENTION)):
        node.update_arg(position, layer)


def _constant(name: str, tensor: Tensor) -> Tensor:
    """Return a buffer or a constant as the graph holds it: real, on the CPU, float32 where it is a float."""
    if not has_real_data(tensor):
        raise UnsupportedModelError(f"the buffer {name} has no data, and nothing says how to compute it")
    tensor = tensor.detach().to("cpu")
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
