"""The tensors of experts in a GGUF file, and how transformers' parameters are made of them.

A file has one tensor for all experts of a layer: `ffn_gate_exps` and `ffn_up_exps` [experts, neurons, inputs], and
`ffn_down_exps` [experts, outputs, neurons]. Classes of transformers have gate and up in one parameter: for each expert
the rows of gate before those of up, or (gpt-oss) one by one, and gpt-oss and Llama 4 have these matrices transposed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Indices = npt.NDArray[np.int64]

_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]+)\.\w+\.(.+)")
# Parameters without a module of their own, and the parts of a file's tensors that they are made of. Some files have
# gate and up in one tensor.
_STACKS: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_gate_up_exps.bias"),
    "experts.up_proj": ("ffn_up_exps.weight",),
    "experts.up_proj_bias": ("ffn_up_exps.bias",),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    # Granite's shared expert.
    "input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "output_linear.weight": ("ffn_down_shexp.weight",),
    "shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight",),
}
_SHARED = re.compile(r"shared_(?:experts?|mlp)\.(gate|up|down)_proj\.weight")
_ROUTER = re.compile(r"(?:gate|router|router\.gate|gate\.wg)\.(weight|bias)")
_CHOICE_BIAS = re.compile(r"(?:\w+\.)*(?:e_score_correction_bias|expert_bias)")
_ORDER = ("ffn_gate_", "ffn_up_")
SHARED_PART = "_shexp."
"""Names of a shared expert's tensors have this in them."""


def expert_tensors(parameter: str) -> tuple[str, ...]:
    """Return the tensors that a parameter of a mixture may be made of, under all names that files have for them.

    There are none for any other parameter.
    """
    match = _LAYER.fullmatch(parameter)
    if match is None:
        return ()
    found = _STACKS.get(match[2], ())
    if shared := _SHARED.fullmatch(match[2]):
        found = (f"ffn_{shared[1]}_shexp.weight",)
    elif router := _ROUTER.fullmatch(match[2]):
        found = (f"ffn_gate_inp.{router[1]}",)
    elif _CHOICE_BIAS.fullmatch(match[2]):
        # Some writers leave out the ending.
        found = ("exp_probs_b.bias", "exp_probs_b.weight", "exp_probs_b")
    return tuple(f"blk.{match[1]}.{name}" for name in found)


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors of one parameter in the order in which it has their rows: gate, up."""
    return tuple(sorted(names, key=lambda name: next((n for n, part in enumerate(_ORDER) if part in name), 0)))


@dataclass(frozen=True)
class Stack:
    """How the rows of a file's tensors lie in a parameter of transformers.

    Rows are along the dimension `axis`, behind that of experts. Rows of two tensors are `interleaved` or one tensor's
    behind the other's, for each expert. A parameter that is `transposed` has [experts, inputs, rows].
    """

    axis: int = 0
    interleaved: bool = False
    transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether a parameter that is made of one tensor is this tensor."""
        return not self.interleaved and not self.transposed

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parameter that is made of `tensors`; it may be a view."""
        values = tensors[0]
        if self.interleaved:
            halves = tensors if len(tensors) == 2 else values.chunk(2, self.axis)
            values = torch.stack(list(halves), self.axis + 1).flatten(self.axis, self.axis + 1)
        elif len(tensors) > 1:
            values = torch.cat(list(tensors), self.axis)
        return values.transpose(self.axis, self.axis + 1) if self.transposed else values

    def rows(self, shape: Sequence[int], wanted: Indices | None, sources: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield for each of `sources` tensors the places that it fills in the `wanted` rows, and its rows there.

        Rows are counted over all experts; None stands for all rows of a parameter of `shape`.
        """
        axis = self.axis + (1 if self.transposed else 0)
        each = shape[axis]
        rows = np.arange(int(np.prod(shape[: self.axis])) * each) if wanted is None else wanted
        expert, row = np.divmod(rows, each)
        if self.interleaved:
            row = row % 2 * (each // 2) + row // 2
        size = each // sources
        source, row = np.divmod(row, size)
        for number in range(sources):
            places = np.flatnonzero(source == number)
            yield places, expert[places] * size + row[places]


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return how each parameter of the experts of a model of transformers lies, by the attributes of their modules."""
    found: dict[str, Stack] = {}
    for path, module in model.named_modules():
        values = vars(module)
        if "is_transposed" not in values or "is_concatenated" not in values:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            fused = name.startswith("gate_up_proj") and not values["is_concatenated"]
            turned = bool(values["is_transposed"]) and parameter.dim() == 3
            found[f"{path}.{name}"] = Stack(1, interleaved=fused, transposed=turned)
    return found
