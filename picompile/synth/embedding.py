"""Both ends of a synthesized network: the embedding, and the final norm and head."""

import torch
from torch import Tensor

from picompile.synth.recipe import CONSTANT, Recipe
from picompile.synth.tokens import Tokens

# Mean square root of a position's row; a token's is 1.
_POSITIONS = 0.3
# Special tokens of a tied head, beside the length of 1 of all others.
_SPECIALS = 0.2
# Deviation of the model's logits.
_LOGITS = 3.0
# Rows of a table that are made at a time.
_ROWS = 4096


def embed(recipe: Recipe, tokens: Tokens) -> Tensor:
    """Writes the embedding (and OPT's position table); returns the stream [tokens, hidden]."""
    shape, name = recipe.shape, f"{recipe.shape.family.names['embedding']}.weight"
    numbers = recipe.generator(name)
    stream = torch.empty(len(tokens.ids), shape.hidden)
    for first in range(0, shape.vocab, _ROWS):
        rows = torch.empty(min(_ROWS, shape.vocab - first), shape.hidden).uniform_(-1, 1, generator=numbers)
        recipe.ignore_direction(rows)
        if shape.tied:
            # The head is this table too, behind the final signs: it shall not see the constant direction either.
            constant = recipe.direction * recipe.signs
            rows.addr_(rows @ constant, constant, alpha=-1 / shape.hidden)
        _even_out(recipe, rows)
        if shape.tied and shape.family.norm == "layer":
            # A layer norm undoes the scale on the way in; on the way out no special token will win.
            rows[[token - first for token in shape.specials if 0 <= token - first < len(rows)]] *= _SPECIALS
        if recipe.offset == "stream":
            rows += CONSTANT * recipe.direction
        rows = recipe.weights.put(name, rows)
        here = (tokens.ids >= first) & (tokens.ids < first + len(rows))
        stream[here] = rows[tokens.ids[here] - first]
    return stream + _position_rows(recipe, tokens) if "positions" in shape.family.names else stream


def _position_rows(recipe: Recipe, tokens: Tokens) -> Tensor:
    name = f"{recipe.shape.family.names['positions']}.weight"
    table = torch.randn(recipe.shape.positions + 2, recipe.shape.hidden, generator=recipe.generator(name))
    return recipe.weights.put(name, _even_out(recipe, table).mul_(_POSITIONS))[2 + tokens.positions]


def _even_out(recipe: Recipe, rows: Tensor) -> Tensor:
    """Scales rows [any, hidden] in place: entries of mean square 1, in the firing subspace as well as outside of it."""
    inside = rows @ recipe.subspace.T
    rows -= inside @ recipe.subspace
    inside *= (len(recipe.subspace) ** 0.5 / inside.norm(dim=1)).unsqueeze(1)
    rows *= ((recipe.shape.hidden - len(recipe.subspace)) ** 0.5 / rows.norm(dim=1)).unsqueeze(1)
    return rows.addmm_(inside, recipe.subspace)


def finish(recipe: Recipe) -> None:
    """Writes the final norm and the head.

    A tied head would find the token that was read in the stream and say it again. Signs in the final norm keep it from
    seeing itself: what comes next is as random as with a head of its own.
    """
    shape, name = recipe.shape, recipe.shape.family.names["final_norm"]
    weight = recipe.signs * (_LOGITS / shape.hidden**0.5) if shape.tied else torch.ones(shape.hidden)
    recipe.weights.put(f"{name}.weight", weight)
    if shape.family.norm == "layer":
        recipe.weights.put(f"{name}.bias", torch.zeros(shape.hidden))
    if not shape.tied:
        _head(recipe, f"{shape.family.names['head']}.weight")


def _head(recipe: Recipe, name: str) -> None:
    numbers, bound = recipe.generator(name), _LOGITS * (3 / recipe.shape.hidden) ** 0.5
    for first in range(0, recipe.shape.vocab, _ROWS):
        count = min(_ROWS, recipe.shape.vocab - first)
        rows = torch.empty(count, recipe.shape.hidden).uniform_(-bound, bound, generator=numbers)
        # Logits of 0 never win: generation doesn't end by chance.
        rows[[token - first for token in recipe.shape.specials if 0 <= token - first < count]] = 0
        recipe.weights.put(name, recipe.ignore_direction(rows))
