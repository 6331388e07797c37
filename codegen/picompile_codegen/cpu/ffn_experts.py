"""The biases of the experts that tokens have chosen, in a feed-forward block."""

from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.tensor import Expr, bind, loop, parallel
from picompile_codegen.cpu.token_experts import ChosenExperts
from picompile_codegen.cpu.vector import at, blocks, fma, load, splat, store, zero_vector


def add_expert_biases(arguments: FfnArguments, chosen: ChosenExperts, tokens: Expr) -> None:
    """Add the biases of each token's experts, times their gains, to y, where there are biases."""
    biases, gains, y, spec = arguments.expert_bias, arguments.gains, arguments.y, arguments.spec
    if biases is None or gains is None:
        return
    with parallel(tokens, when_worth=spec.rows > 1) as token:
        experts = chosen.of(gains, token)

        def add(c: Expr, valid: int) -> None:
            value = zero_vector()
            value[at(0)] = load(y, token, c, valid=valid)
            with loop(0, experts.count) as i:
                number = bind(experts.number(i))
                gain = splat(experts.gains[token, number])
                value[at(0)] = fma(gain, load(biases, number * spec.dim + c, valid=valid), value[at(0)])
            store(y, token, c, value=value[at(0)], valid=valid)

        blocks(spec.dim, add)
