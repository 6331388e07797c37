"""A GGUF file as a model: its config, and its tensors under the names, in the shapes and orders of Hugging Face."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.config import quiet_transformers
from picompile.frontend.gguf.block_codes import STORED
from picompile.frontend.gguf.blocks import (
    PLAIN,
    UNPACKED,
    pack_f16,
    part_of,
    read_blocks,
    read_rows,
    read_tensor,
    repack,
)
from picompile.frontend.gguf.conversion import convert, processor_for, row_order
from picompile.frontend.gguf.experts import SHARED_PART, Indices, Stack, stacks_of
from picompile.frontend.gguf.header import GgufHeader, TensorEntry
from picompile.frontend.gguf.mapped import mapped
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.model_config import model_classes, model_config, shared_field
from picompile.frontend.gguf.names import TRANSPOSED_DOWN, further_tensors, map_names, sources_by_parameter
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header
from picompile.frontend.gguf.plain import PlainPlace
from picompile.frontend.gguf.records import find_record
from picompile.frontend.gguf.views import with_views
from picompile.frontend.messages import one_line, shown
from picompile.frontend.weight_values import check_values, damaged
from picompile_passes.formats import FORMATS
from picompile_passes.graph.weight_source import as_run, take_rows

# Bytes of the start and of the end of each tensor that a fingerprint depends on.
_SAMPLE_BYTES = 4096
_RESHAPED = re.compile(r"\.ssm_|\.shortconv\.|_exps\.|_shexp\.|\.attn_[kv]_b\.")


@dataclass(frozen=True)
class GgufTensor:
    """A parameter of the model: what safetensors calls the dtype that `load` returns, and its shape.

    `type` is the file's name for how it is stored, and `sources` are the names of its tensors there; experts' matrices
    of gate and up are two.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    type: str
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the tensor in the file, the first of them where there are several."""
        return self.sources[0]


class GgufModel:
    """The model in a GGUF file, mapped into memory; tensors are read one at a time.

    `config` has the contents of a config.json, `tensors` says for the name of each parameter what the file has, and
    `header` has the metadata.
    """

    def __init__(
        self,
        header: GgufHeader,
        config: dict[str, Any],
        parameters: Mapping[str, tuple[int, ...]],
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:
        """`parameters` are the names of the state dict that `config` describes, and their shapes.

        `stacks` says how those of experts are made of tensors.
        """
        self.config = config
        self._stacks = dict(stacks or {})
        self._architecture = read_text(header, "general.architecture") or ""
        self._processor = processor_for(self._architecture, config, find_record(header))
        layers = shared_field(config, "block_count")
        self._names = map_names(
            header, architecture=self._architecture, layers=layers, parameters=parameters, processor=self._processor
        )
        self.header = header = with_views(header, self._names, parameters)
        left_out = further_tensors(header, layers) if layers else []
        sources = sources_by_parameter(header, self._names, left_out)
        self.notes = _notes(header.file, left_out)
        self.tensors: Mapping[str, GgufTensor] = {
            name: self._describe(name, entries, parameters.get(name)) for name, entries in sources.items()
        }
        self._checked: set[str] = set()
        self._data = {file: mapped(file) for file in {entry.file: None for entry in header.tensors.values()}}
        for entry in header.tensors.values():
            if len(self._data[entry.file]) < entry.offset + entry.size_bytes:
                raise UnsupportedModelError(f"{entry.file}: has become shorter while it was read")

    def load(self, name: str) -> Tensor:
        """Return the parameter `name`: float32, float16 or bfloat16 as the file has it, quantized types as float32.

        Memory is taken for this parameter alone; what is not converted is mapped from the file, and must not be
        written to. Raises `KeyError` for a name that there is not, `UnsupportedModelError` for NaN and infinity.
        """
        tensor = self.tensors[name]
        entries = [self.header.tensors[source] for source in tensor.sources]
        order = self._order(tensor)
        if (stack := self._stack(name, tensor.sources)) is not None:
            values = self._joined(stack, entries)
        elif len(entries) == 1 and order is not None:
            values = read_tensor(self._data[entries[0].file], entries[0])
            values = values if _is_sorted(order) else values[torch.from_numpy(order)]
        elif len(entries) == 1 and _is_transposed(entries[0]):
            values = read_tensor(self._data[entries[0].file], entries[0]).T.contiguous()
        else:
            stored = {entry.name: read_tensor(self._data[entry.file], entry) for entry in entries}
            values = convert(self._processor, self._names, name, stored)
        if values.shape != tensor.shape and _without_ones(values.shape) == _without_ones(tensor.shape):
            values = values.view(tensor.shape)
        if values.shape != tensor.shape:
            raise UnsupportedModelError(f"{tensor.file}: {name} is {list(values.shape)}, not {list(tensor.shape)}")
        self._check_values(name, values)
        return values

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of the matrix or stack of matrices `name`, as `picompile_passes` asks for them.

        Of experts' matrices no more is read than these rows, or the experts that have them where the file has the
        matrices transposed. Raises as `load` does.
        """
        tensor = self.tensors[name]
        stack, order = self._stack(name, tensor.sources), self._order(tensor)
        if stack is not None and stack.transposed:
            height = tensor.shape[-2]
            first, last = (int(end) // height for end in torch.aminmax(rows))
            entries = [part_of(self.header.tensors[source], first, last + 1) for source in tensor.sources]
            values = take_rows(self._joined(stack, entries), rows - first * height)
        elif len(tensor.shape) == 3 and (stack is not None or (order is not None and _is_sorted(order))):
            values = torch.empty(len(rows), tensor.shape[-1], dtype=PLAIN[tensor.dtype])
            for source, (places, own) in zip(tensor.sources, self._rows_of(name, rows.numpy()), strict=True):
                entry = self.header.tensors[source]
                values[as_run(torch.from_numpy(places))] = read_rows(self._data[entry.file], entry, own)
        else:
            return take_rows(self.load(name), rows)
        check_values(values, f"{self.header.file}: {name}", "file")
        return values

    def _joined(self, stack: Stack, entries: Sequence[TensorEntry]) -> Tensor:
        """Return the parameter of experts that `entries` make; numbers of several dtypes become float32."""
        parts = [read_tensor(self._data[entry.file], entry) for entry in entries]
        return stack.join(parts if len({part.dtype for part in parts}) == 1 else [part.float() for part in parts])

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the parameter `name` [rows, columns] packed as `format_name`, uint8 [rows, row bytes], or None.

        With `transposed` the rows are those of the transposed matrix, in which down projections are stored by
        artifacts, and PowerInfer's files have them. A parameter of experts has a matrix for each: rows are those of all
        of them. `rows` are the numbers of rows that are wanted, all if it is None. `dequantize_rows` makes of the
        result the same numbers as `load`, bit for bit. None stands for everything that would have to be rounded again.
        Raises as `load` does.
        """
        tensor = self.tensors[name]
        if not 2 <= len(tensor.shape) <= 3:
            return None
        if FORMATS[format_name].scale is None:
            if tensor.dtype != "F16":
                return None
            values = self.load(name)
            matrix = (values.transpose(-1, -2) if transposed else values).flatten(0, -2)
            return pack_f16(matrix if rows is None else matrix[rows])
        if self.stored_format(name, transposed) != format_name:
            return None
        wanted, parts = None if rows is None else rows.numpy(), []
        for source, (places, order) in zip(tensor.sources, self._rows_of(name, wanted), strict=True):
            if len(places) == 0:
                continue
            entry = self.header.tensors[source]
            blocks = read_blocks(self._data[entry.file], entry)
            whole = len(order) == len(blocks) and _is_sorted(order)
            try:
                packed = repack(blocks if whole else blocks[order], entry.type, entry.shape[-1])
            except ValueError as error:
                raise damaged(f"{tensor.file}: {name}", "file") from error
            if packed is None:
                return None
            parts.append((places, packed))
        if len(parts) == 1:
            return parts[0][1]
        result = torch.empty(sum(len(places) for places, _ in parts), parts[0][1].shape[1], dtype=torch.uint8)
        for places, packed in parts:
            result[as_run(torch.from_numpy(places))] = packed
        return result

    def _rows_of(self, name: str, wanted: Indices | None) -> list[tuple[Indices, Indices]]:
        """Return for each tensor of a parameter the places that it fills in the `wanted` rows, and its rows there."""
        tensor = self.tensors[name]
        if (stack := self._stack(name, tensor.sources)) is not None:
            return list(stack.rows(tensor.shape, wanted, len(tensor.sources)))
        order = self._order(tensor)
        if order is None or len(tensor.shape) == 3:
            shape = tensor.shape[::-1] if order is None else tensor.shape
            order = np.arange(math.prod(shape[:-1]))
        chosen = order if wanted is None else order[wanted]
        return [(np.arange(len(chosen)), chosen)]

    def stored_format(self, name: str, transposed: bool = False) -> str | None:
        """Return the format of ours that has the numbers of the parameter `name`, or of its transpose, in its rows.

        None for plain numbers, for types that no format of ours has, and where rows are made of several tensors, but
        for those of experts, which have whole rows of each.
        """
        tensor = self.tensors[name]
        if (stack := self._stack(name, tensor.sources)) is not None:
            forms = {STORED.get(self.header.tensors[source].type) for source in tensor.sources}
            return forms.pop() if len(forms) == 1 and transposed == stack.transposed else None
        if not 2 <= len(tensor.shape) <= 3 or len(tensor.sources) != 1:
            return None
        is_transposed = _is_transposed(self.header.tensors[tensor.sources[0]])
        order = self._order(tensor)
        is_kept = order is not None and (len(tensor.shape) == 2 or _is_sorted(order))
        same_rows = transposed == is_transposed and (transposed or is_kept)
        return STORED.get(tensor.type) if same_rows else None

    def plain_place(self, name: str) -> PlainPlace | None:
        """Return where the parameter `name` lies if it is one tensor of the file, at most in another order of rows."""
        tensor = self.tensors[name]
        order = self._order(tensor)
        if order is None or len(tensor.sources) != 1 or self._stack(name, tensor.sources) is not None:
            return None
        rows = None if _is_sorted(order) else tuple(order.tolist())
        return PlainPlace(tensor.sources[0], tensor.dtype, tensor.shape, rows)

    def is_turned(self, name: str) -> bool:
        """Return whether the file has the matrices of the parameter `name` transposed, as gpt-oss's experts."""
        stack = self._stack(name, self.tensors[name].sources)
        return stack is not None and stack.transposed

    def fingerprint(self, config: Mapping[str, Any] | None = None) -> str:
        """Return hex digits that are the same for the same metadata of the model and the same tensors.

        They depend on what the metadata say about the architecture, on each tensor's name, type and shape, and on 4 kB
        from either end of its data. `config` is what the model is read by, the file's own unless given.
        """
        prefix = f"{self._architecture}."
        own = {key: value for key, value in self.header.values.items() if key.startswith(prefix)}
        digest = hashlib.sha256(json.dumps([self._architecture, own, config or self.config], sort_keys=True).encode())
        for name, entry in sorted(self.header.tensors.items()):
            start, end = entry.offset, entry.offset + entry.size_bytes
            data = self._data[entry.file]
            samples = data[start : min(end, start + _SAMPLE_BYTES)] + data[max(start, end - _SAMPLE_BYTES) : end]
            digest.update(len(samples).to_bytes(8, "little"))
            digest.update(json.dumps([name, entry.type, entry.shape]).encode() + samples)
        return digest.hexdigest()

    def _stack(self, name: str, sources: tuple[str, ...]) -> Stack | None:
        """Return how a parameter of experts is made of tensors; None for all others, and where it is one tensor."""
        stack = self._stacks.get(name)
        if len(sources) == 1:
            return None if stack is None or stack.is_plain else stack
        # Gate and up of a shared expert are no parameter of experts.
        is_pair = all(SHARED_PART in source for source in sources)
        return Stack() if stack is None and is_pair else stack

    def _describe_stack(self, stack: Stack, entries: Sequence[TensorEntry], expected: tuple[int, ...]) -> GgufTensor:
        """Return the parameter of the shape `expected`, where the tensors make it; else what they are made into."""
        entry = entries[0]
        try:
            made = stack.join([torch.empty(each.shape, device="meta") for each in entries]).shape
        except (IndexError, RuntimeError):  # shapes that make no parameter
            made = torch.Size(entry.shape)
        types = {each.type for each in entries}
        stored = entry.type if len(types) == 1 and entry.type in PLAIN else "F32"
        sources = tuple(each.name for each in entries)
        # A quantized type tells more than a plain one.
        kind = next((each.type for each in entries if each.type not in PLAIN), entry.type)
        return GgufTensor(self.header.file, dtype=stored, shape=tuple(made), type=kind, sources=sources)

    def _describe(self, name: str, sources: tuple[str, ...], expected: tuple[int, ...] | None) -> GgufTensor:
        entries = [self.header.tensors[source] for source in sources]
        entry = entries[0]
        for each in entries:
            if each.type not in PLAIN and each.type not in UNPACKED:
                raise UnsupportedModelError(
                    f"{self.header.file}: {shown(each.name)} is {each.type}; read are {', '.join(PLAIN)} and "
                    f"{', '.join(sorted(UNPACKED))}"
                )
        shape = entry.shape[::-1] if _is_transposed(entry) else entry.shape
        if expected is not None and (stack := self._stack(name, sources)) is not None:
            return self._describe_stack(stack, entries, expected)
        plain = len(entries) == 1 and (
            _is_transposed(entry) or row_order(self._processor, entry.name, entry.shape) is not None
        )
        elements = sum(math.prod(each.shape) for each in entries)
        if expected is not None and shape != expected and _without_ones(shape) == _without_ones(expected):
            shape = expected
        if not plain and expected is not None and elements == math.prod(expected) and self._may_reshape(entry):
            shape = expected
        stored = entry.type if plain and entry.type in PLAIN else "F32"
        return GgufTensor(self.header.file, dtype=stored, shape=tuple(shape), type=entry.type, sources=sources)

    def _may_reshape(self, entry: TensorEntry) -> bool:
        """Return whether a processor makes another shape: rows for columns, one dimension more, two matrices in one."""
        return self._architecture == "gpt2" or bool(_RESHAPED.search(entry.name))

    def _order(self, tensor: GgufTensor) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        entry = self.header.tensors[tensor.sources[0]]
        single = len(tensor.sources) == 1 and not _is_transposed(entry)
        return row_order(self._processor, entry.name, entry.shape) if single else None

    def _check_values(self, name: str, values: Tensor) -> None:
        """Refuse what `checkpoint.py` refuses of safetensors, once for each parameter."""
        if name not in self._checked:
            check_values(values, f"{self.header.file}: {name}", "file")
            self._checked.add(name)


def open_gguf(path: Path) -> GgufModel:
    """Return the model of the GGUF file `path`, everything about it checked but its numbers.

    Of a model in several files, `path` is the first; the others lie beside it.

    Every parameter of the model that the metadata describe is there in its shape, and nothing else. Raises `UsageError`
    for what is no file; `UnsupportedModelError`, in one line, for a file that is damaged or
    whose model is not supported.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        header = read_model_header(path, MOST_MODEL_ELEMENTS)
        config = model_config(header)
        model = _empty_model(path, config)
        parameters = {name: tuple(values.shape) for name, values in model.state_dict(keep_vars=True).items()}
        opened = GgufModel(header, config, parameters, stacks_of(model))
    except UsageError as error:
        raise UnsupportedModelError(str(error)) from error
    _check_parameters(opened, model)
    _check_rotary(header, config, model)
    return opened


def _empty_model(path: Path, config: Mapping[str, Any]) -> nn.Module:
    """Return the model of `config` without memory for its parameters."""
    config_class, model_class = model_classes(config)
    try:
        with quiet_transformers(), torch.device("meta"):
            model: nn.Module = model_class._from_config(config_class.from_dict(dict(config)), dtype=torch.float32)
    except Exception as error:
        raise UnsupportedModelError(f"{path}: its metadata describe no model: {one_line(error)}") from error
    return model


def _check_rotary(header: GgufHeader, config: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a file that turns a part of each head, if the class of its model turns all of it."""
    architecture = read_text(header, "general.architecture") or ""
    count = header.values.get(f"{architecture}.rope.dimension_count")
    if not count:
        return
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq") and 2 * frequencies.shape[-1] != count:
            raise UnsupportedModelError(
                f"{header.file}: {shown(architecture)}.rope.dimension_count is {count!r:.40}, but "
                f"{config['architectures'][0]} turns {2 * frequencies.shape[-1]} numbers of each head"
            )


def _check_parameters(opened: GgufModel, model: nn.Module) -> None:
    file = opened.header.file
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        if not any(name in opened.tensors for name in names):
            raise UnsupportedModelError(f"{file}: has no tensor for {names[0]}, which its metadata ask for")
    for name, values in model.state_dict(keep_vars=True).items():
        tensor = opened.tensors.get(name)
        if tensor is not None and tensor.shape != tuple(values.shape):
            raise UnsupportedModelError(
                f"{file}: {shown(tensor.sources[0])} makes {name} {list(tensor.shape)}, but its metadata make it "
                f"{list(values.shape)}"
            )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _notes(file: Path, left_out: Sequence[str]) -> tuple[str, ...]:
    """Return the line about tensors that are no part of the decoder, none where there are no such tensors."""
    if not left_out:
        return ()
    more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return (
        f"{file.name}: left out, as no part of the decoder: layers that guess further tokens "
        f"({shown(left_out[0])}{more})",
    )


def _is_transposed(entry: TensorEntry) -> bool:
    return TRANSPOSED_DOWN in entry.name and len(entry.shape) == 2


def _is_sorted(order: Iterable[int]) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))  # type: ignore[arg-type]
