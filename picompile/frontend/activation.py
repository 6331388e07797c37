"""The activation that a user gives, in place of the one that a config.json names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.config import field_defaults
from picompile.frontend.families import ACTIVATIONS, FAMILIES, Family, find_family, is_threshold
from picompile.options import Option
from picompile.quantities import shortened

# What transformers' configs of causal language models call the activation of their feed-forward blocks.
_FIELDS = (
    *("hidden_act", "activation_function", "hidden_activation", "activation"),
    *("mlp_hidden_act", "ff_activation", "afn"),
)
# Papers write the dialect's names so.
_TITLES = {
    "relu": "ReLU",
    "relu2": "ReLU²",
    "relu6": "ReLU6",
    "fatrelu": "FATReLU",
    "silu": "SiLU",
    "clamped_swish": "clamped SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU",
    "quick_gelu": "GELU",
}
_FATRELU = re.compile(r"fatrelu\(([^()]+)\)")


def check_activation(activation: str | None) -> None:
    """Raise `UsageError` for an activation that is not known; None, which leaves the config as it is, always is."""
    if activation is not None:
        dialect_text(activation)


def dialect_text(activation: str) -> str:
    """Return the dialect's text for an activation that a user names.

    Args:
        activation: a name of `ACTIVATIONS`, such as `relu` or `gelu_new`, or `fatrelu(0.01)` with its threshold.

    Raises:
        UsageError: the name is not known, or the threshold is no number that FATReLU can have.
    """
    threshold = _threshold(activation)
    if threshold is not None:
        return f"fatrelu({threshold!r})"
    if activation.startswith("fatrelu"):
        raise UsageError(f"{shortened(repr(activation))}: FATReLU has a threshold of 0 or more, as in fatrelu(0.01)")
    if activation not in ACTIVATIONS:
        raise UsageError(
            f"unknown activation {shortened(repr(activation))}; known are {', '.join(ACTIVATIONS)}, fatrelu(THRESHOLD)"
        )
    return ACTIVATIONS[activation]


def activation_title(text: str) -> str:
    """Return how papers write the activation whose dialect text this is: `ReLU` for `relu`."""
    name = text.partition("(")[0]
    return _TITLES.get(name, name)


def with_activation(raw: Mapping[str, Any], activation: str | None) -> dict[str, Any]:
    """Return the contents of a config.json with `activation` in place of the one that it names.

    Nothing changes where it names this activation already, if by another name, or where `activation` is None.

    Args:
        raw: the contents of the config.json, which are not changed.
        activation: a name as `dialect_text` takes it.

    Raises:
        UsageError: the activation is not known.
        UnsupportedModelError: the model is not supported, or its class cannot compute this activation.
    """
    if activation is None:
        return dict(raw)
    wanted, threshold, family = dialect_text(activation), _threshold(activation), find_family(raw)
    if family.fixed_activation is not None:
        if wanted != family.fixed_activation:
            raise UnsupportedModelError(
                f"--activation {activation}: models of the family {family.name} always compute "
                f"{family.fixed_activation}; leave it out"
            )
        return dict(raw)
    if threshold is not None and not family.is_known:
        raise UnsupportedModelError(
            f"--activation {activation}: FATReLU is supported for the families {', '.join(_fatrelu_families())}, "
            f"not for {family.name}"
        )
    fields = dict(_named(family, raw))
    if all(named == wanted for named in fields.values()):
        return dict(raw)
    if threshold is not None:
        return {**raw, **dict.fromkeys(fields, "fatrelu"), "hidden_act_param": threshold}
    return {**raw, **dict.fromkeys(fields, activation)}


def named_activations(raw: Mapping[str, Any]) -> set[str | None]:
    """Return the dialect's texts of the activations that a config.json names, None for one that the dialect has not."""
    return {text for _, text in _named(find_family(raw), raw)}


def _named(family: Family, raw: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the fields that name an activation, and the dialect's text for it, None where it has none."""
    defaults = field_defaults(family)
    for field in (family.activation,) if family.is_known else (name for name in _FIELDS if name in defaults):
        name, threshold = raw.get(field, defaults[field]), raw.get("hidden_act_param")
        if family.is_known and name == "fatrelu" and is_threshold(threshold):
            yield field, f"fatrelu({float(threshold)!r})"
        else:
            yield field, ACTIVATIONS.get(name) if isinstance(name, str) else None


ACTIVATION = Option(
    "Activation of MODEL's feed-forward blocks, where its config.json names another than it was trained with: relu, "
    "silu, … or fatrelu(0.01). Default: what config.json says.",
    metavar="NAME",
    check=dialect_text,
)


def _threshold(activation: str) -> float | None:
    """Return the threshold of FATReLU, None for other activations and for what is no threshold."""
    match = _FATRELU.fullmatch(activation)
    try:
        threshold = None if match is None else float(match[1])
    except ValueError:
        return None
    return threshold if is_threshold(threshold) else None


def _fatrelu_families() -> list[str]:
    families = (family for types in FAMILIES.values() for family in types.values())
    free = (family for family in families if family.fixed_activation is None)
    return sorted({family.name for family in free if not family.activations or "fatrelu" in family.activations})
