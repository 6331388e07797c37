"""The verifier, which checks a graph against the rules of its stage.

The rules are data: `rules` has one table of them for each stage.
"""

from torch.fx import GraphModule

from picompile_passes.base import Stage
from picompile_passes.errors import VerifyError
from picompile_passes.graph.dump import context_text
from picompile_passes.verify.rule import Fault, Rule
from picompile_passes.verify.rules import RULES

__all__ = ["RULES", "Fault", "Rule", "verify"]


def verify(graph_module: GraphModule, stage: Stage) -> None:
    """Check `graph_module` against the rules of `stage`, in order.

    Raises:
        VerifyError: At the first fault. It names the rule, the node, what is wrong, and the ten nodes around it.
    """
    for rule in RULES[stage]:
        for fault in rule.check(graph_module):
            context = context_text(fault.node) if fault.node is not None else ""
            raise VerifyError(rule.name, fault.node, fault.message, context)
