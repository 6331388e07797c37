"""The state of operators as tensors of a program, each with a place for every sequence."""

from torch.fx import Node

from picompile_codegen.lowering.function import Function
from picompile_codegen.lowering.program import Arg, Memory, ProgramState
from picompile_codegen.specs.arguments import cache_data, scale_groups
from picompile_passes.dialect.state import TOKENS
from picompile_passes.formats import CACHE_FORMATS
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import state_of


def state_tensors(node: Node, function: Function) -> dict[str, Arg]:
    """Return the state of `node` by name, which its first call adds to the program.

    Tensors in q8 and q4 have another one beside them, called `name`_scales.
    """
    state, options = state_of(node), function.shared.options
    assert state is not None, f"{node.name} keeps no state"
    dtype = options.kv_dtype if options.kv_dtype in state.dtypes else state.dtypes[0]
    memory: Memory = "host" if node in function.lent else function.device
    found = {}
    for name, shape in state.shapes(arguments(node)).items():
        *rows, dim = (options.context if size == TOKENS else size for size in shape)
        own = f"{name}.{node.meta['layer']}"
        tensors = {name: (own, *cache_data(dtype, dim))}
        if dtype in CACHE_FORMATS:
            tensors[f"{name}_scales"] = (f"{own}.scale", "float16", scale_groups(dim))
        for key, (stored, element, width) in tensors.items():
            tensor = ProgramState(
                element,
                (options.sequences, *rows, width),
                memory=memory,
                kind=state.kind,
                layer=node.meta["layer"],
                grows=shape.index(TOKENS) if TOKENS in shape else None,
            )
            function.shared.state.setdefault(stored, tensor)
            found[key] = Arg("state", stored)
    return found


def state_operands(node: Node) -> list[Node]:
    """Return the values that the state of `node` depends on."""
    state = state_of(node)
    assert state is not None, f"{node.name} keeps no state"
    return [arguments(node)[name] for name in state.operands] or node.all_input_nodes
