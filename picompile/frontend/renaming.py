"""Tensor names of a checkpoint as the model has them, by transformers' own conversion mappings.

transformers renames many checkpoints as it loads them (`embed_out` of GPT-NeoX is the model's `lm_head`). The rules are
in its library; here they are only applied. Models of ours have rules in `published_names`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from picompile.errors import UnsupportedModelError
from picompile.frontend.left_out import LeftOut
from picompile.frontend.stacks import Stack, expert_number, makes_stack, stacked
from picompile.frontend.tensor_file import TensorHeader, read_tensor

# Tables and masks that earlier versions of a class kept in its checkpoints.
_COMPUTED = re.compile(r"(inv_freq|masked_bias|attention\.bias|attn\.bias|position_ids)$")


def rename(folder: Path, headers: Mapping[str, TensorHeader], model: nn.Module) -> dict[str, TensorHeader]:
    """Return `headers` under the names that `model` has for the tensors; one that it has no name for keeps its own.

    Tensors of one expert each become the stack that the model has. Raises `UnsupportedModelError` where two
    tensors would have one name, for experts that are missing or too many, and for tensors of which transformers makes
    others in another way.
    """

    # Models that transformers does not have bring their own rules.
    transforms = [*getattr(model, "published_names", list)(), *get_model_conversion_mapping(model)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    shapes, own = _shapes(model), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, TensorHeader] = {}
    stacks: dict[str, Stack] = {}
    for name in sorted(headers):
        target, expert = name, expert_number(name)
        if name not in own:
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is not None and target != name:
                converter = by_pattern[pattern]
                if target in shapes and expert is not None and makes_stack(converter):
                    other = stacks.setdefault(target, Stack(converter)).add(pattern, expert, headers[name])
                    if other is not headers[name]:
                        raise UnsupportedModelError(f"{folder}: holds {other.name} and {name}: two for one expert")
                    continue
                if target in shapes:
                    raise UnsupportedModelError(
                        f"{folder}: {name} is a part of {target}, which transformers puts together as it loads; "
                        "that is not supported"
                    )
                # Others are of a part that is left out, such as a layer of experts behind the last.
                target = target if expert is None else name
        if target in found:
            raise UnsupportedModelError(f"{folder}: {found[target].name} and {name} are both the model's {target}")
        found[target] = headers[name]
    for target, header in stacked(folder, stacks, shapes).items():
        if target in found:
            part = header.parts[0][0].name
            raise UnsupportedModelError(f"{folder}: {found[target].name} and {part} are both the model's {target}")
        found[target] = header
    return found


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of `model`, by all names that a checkpoint may have for them."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {
        variant: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        for variant in (name, name.removeprefix(prefix), prefix + name)
    }


class IgnoredTensors:
    """Tells which tensors of a checkpoint the model has no parameter for, and may leave out.

    These are the names that transformers itself ignores for the model's class, buffers that hold what the model
    computes, and what `left_out` knows to be of another part. The call raises `UnsupportedModelError` for a buffer with
    other values.
    """

    def __init__(self, headers: Mapping[str, TensorHeader], model: nn.Module, left_out: LeftOut) -> None:
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._buffers = dict(model.named_buffers())
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self._headers = headers
        self._left_out = left_out

    def __call__(self, name: str) -> bool:
        """Return whether the tensor `name` may be left out."""
        ignored = any(pattern.search(name) for pattern in self._patterns)
        if ignored and _COMPUTED.search(name):
            return True
        own = next((own for own in (name, self._prefix + name) if own in self._buffers), None)
        if own is not None:
            return ignored or self._is_computed(name, self._buffers[own])
        return self._left_out.take(name, ignored=ignored)

    def _is_computed(self, name: str, computed: torch.Tensor) -> bool:
        header = self._headers[name]
        stored = read_tensor(header.file, header.name)
        if computed.is_meta:
            raise UnsupportedModelError(f"{header.file}: {name} is a buffer of values that no config.json makes")
        # As far apart as bfloat16 rounds.
        same = stored.shape == computed.shape and torch.allclose(
            stored.float(), computed.float(), rtol=2**-8, atol=1e-5
        )
        if not same:
            raise UnsupportedModelError(
                f"{header.file}: {header.name} has other values than config.json makes it, which is not supported"
            )
        return True
