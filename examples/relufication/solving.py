"""Least squares for the down projections, layer by layer, each for the inputs that those before it leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from picompile.errors import UnsupportedModelError
from relufication.pair import Pair, decoder_layers, feed_forward_blocks

# Of the mean of the Gram matrix's diagonal. It draws the solution towards the original's weights. Of values
# from 0.0001 to 0.1, this gave the least error on other text, for a layer of SmolLM2-135M solved on 20,480 tokens.
_RIDGE = 0.1


@torch.no_grad()
def solve_down(pair: Pair, batches: Sequence[Tensor]) -> None:
    """Give each down projection of the copy its least-squares solution on `batches`, int64 [rows, window] each.

    minimize ‖h·dᵀ - y‖² + r‖d - d₀‖², with the copy's neurons h, its weights d₀, and what the block has to add for the
    copy's stream to be the original's behind this layer: y. So a block makes up for errors of the layers before it.
    """
    arguments = [given for _, given in _calls(pair.original, batches[0], whole=True)]
    exact = [_calls(pair.original, batch)[0][0] for batch in batches]
    found = list(exact)
    layers = zip(decoder_layers(pair.original), decoder_layers(pair.copy), feed_forward_blocks(pair.copy), strict=True)
    for (original, copy, block), given in zip(layers, arguments, strict=True):
        gram, product, parts = 0.0, 0.0, []
        for place, stream in enumerate(exact):
            exact[place] = original(stream, **given)
            after, neurons, added = _run(copy, block, found[place], given)
            wanted = added + exact[place] - after
            if block.down_proj.bias is not None:
                wanted = wanted - block.down_proj.bias
            found[place] = after - added
            parts.append(neurons)
            gram = gram + neurons.flatten(0, -2).T @ neurons.flatten(0, -2)
            product = product + neurons.flatten(0, -2).T @ wanted.flatten(0, -2)
        _solve(block.down_proj, gram, product)
        for place, neurons in enumerate(parts):
            found[place] = found[place] + block.down_proj(neurons)


def check_added(pair: Pair, batch: Tensor) -> None:
    """Raise `UnsupportedModelError` where a block's output is not added to the stream as it is: scaled, or normed."""
    ((stream, given),) = _calls(pair.copy, batch)
    layer, block = decoder_layers(pair.copy)[0], feed_forward_blocks(pair.copy)[0]
    with torch.no_grad():
        before, _, added = _run(layer, block, stream, given)
        hook = block.register_forward_hook(lambda *_: 2 * added)
        after = layer(stream, **given)
        hook.remove()
    if not torch.allclose(after - before, added, rtol=1e-3, atol=1e-3 * float(added.abs().max())):
        raise UnsupportedModelError(
            f"{type(pair.copy).__name__}: the output of a block is not added to the stream as it is, so no block "
            "can learn alone; give --solve-tokens 0 --blocks 0"
        )


def _calls(model: nn.Module, batch: Tensor, whole: bool = False) -> list[tuple[Tensor, dict[str, Any]]]:
    """The stream before a layer, and what else it is called with: of the first layer, or of the `whole` model."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        calls.append((inputs[0], given))
        if not whole:
            raise _EnoughError

    layers = decoder_layers(model)
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            model.base_model(batch, use_cache=False)  # type: ignore[operator]
    except _EnoughError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return calls


class _EnoughError(Exception):
    """The first layer's input is known; the others need not be computed."""


def _run(layer: nn.Module, block: nn.Module, stream: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer. Return the stream behind it, its neurons, and what its block has added."""
    seen: list[Tensor] = []
    hook = block.down_proj.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))  # type: ignore[union-attr]
    after = layer(stream, **given)
    hook.remove()
    neurons, added = seen
    return after, neurons, added


def _solve(down: nn.Linear, gram: Tensor, product: Tensor) -> None:
    ridge = _RIDGE * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    down.weight.copy_(torch.linalg.solve(gram, product + ridge * down.weight.T).T)
