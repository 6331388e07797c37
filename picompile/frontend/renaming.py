"""Tensor names of a checkpoint as the model has them, by transformers' own conversion mappings.

transformers renames many checkpoints as it loads them (`embed_out` of GPT-NeoX is the model's `lm_head`). The rules are
in its library; here they are only applied.
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
from picompile.frontend.tensor_file import TensorHeader, read_tensor

# Tables and masks that earlier versions of a class kept in its checkpoints.
_COMPUTED = re.compile(r"(inv_freq|masked_bias|attention\.bias|attn\.bias|position_ids)$")


def rename(folder: Path, headers: Mapping[str, TensorHeader], model: nn.Module) -> dict[str, TensorHeader]:
    """Return `headers` under the names that `model` has for the tensors; one that it has no name for keeps its own.

    Raises `UnsupportedModelError` where two tensors would have one name, and for tensors of which transformers makes
    others, which is not supported.
    """

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = {name: None for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, TensorHeader] = {}
    for name in sorted(headers):
        target = name
        if name not in expected:
            target, pattern = rename_source_key(name, renamings, converters)
            # Others are of a part that is left out.
            if pattern is not None and target != name and target in expected:
                if ".experts." in name:
                    raise UnsupportedModelError(f"{folder}: mixtures of experts are not supported ({name})")
                raise UnsupportedModelError(
                    f"{folder}: {name} is a part of {target}, which transformers puts together as it loads; "
                    "that is not supported"
                )
        if target in found:
            raise UnsupportedModelError(f"{folder}: {found[target].name} and {name} are both the model's {target}")
        found[target] = headers[name]
    return found


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
