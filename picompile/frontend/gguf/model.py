"""A GGUF file as a model: its config, and its tensors under the names, in the shapes and orders of Hugging Face."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.config import quiet_transformers
from picompile.frontend.gguf.blocks import PLAIN, UNPACKED
from picompile.frontend.gguf.conversion import convert, number_added, processor_for, row_order
from picompile.frontend.gguf.experts import SHARED_PART, Stack, stacks_of
from picompile.frontend.gguf.header import GgufHeader, TensorEntry
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.model_config import model_classes, model_config, shared_field
from picompile.frontend.gguf.names import TRANSPOSED_DOWN, further_tensors, map_names, sources_by_parameter
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header
from picompile.frontend.gguf.records import find_record
from picompile.frontend.gguf.tensors import GgufTensor, TensorReader, is_sorted, without_ones
from picompile.frontend.gguf.views import with_views
from picompile.frontend.messages import one_line, shown

# Bytes of the start and of the end of each tensor that a fingerprint depends on.
_SAMPLE_BYTES = 4096
_RESHAPED = re.compile(r"\.ssm_|\.shortconv\.|_exps\.|_shexp\.|\.attn_[kv]_b\.")


class GgufModel(TensorReader):
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
        tensors = {name: self._describe(name, entries, parameters.get(name)) for name, entries in sources.items()}
        super().__init__(header, tensors)

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

    def _describe_stack(self, stack: Stack, entries: Sequence[TensorEntry]) -> GgufTensor:
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
        return GgufTensor(self.header.file, stored, tuple(made), kind, sources, stack=stack)

    def _describe(self, name: str, sources: tuple[str, ...], expected: tuple[int, ...] | None) -> GgufTensor:
        """Return how the parameter `name` is made; of the shape `expected`, where the tensors make it."""
        entries = [self.header.tensors[source] for source in sources]
        entry = entries[0]
        for each in entries:
            if each.type not in PLAIN and each.type not in UNPACKED:
                raise UnsupportedModelError(
                    f"{self.header.file}: {shown(each.name)} is {each.type}; read are {', '.join(PLAIN)} and "
                    f"{', '.join(sorted(UNPACKED))}"
                )
        stack = self._stack(name, sources)
        if expected is not None and stack is not None:
            return self._describe_stack(stack, entries)
        transposed = TRANSPOSED_DOWN in entry.name and len(entry.shape) == 2
        shape = entry.shape[::-1] if transposed else entry.shape
        elements = sum(math.prod(each.shape) for each in entries)
        if expected is not None and shape != expected and without_ones(shape) == without_ones(expected):
            shape = expected
        made = GgufTensor(self.header.file, entry.type, tuple(shape), entry.type, sources)
        if len(entries) == 1 and transposed:
            made = replace(made, transposed=True)
        elif len(entries) == 1 and (order := row_order(self._processor, entry.name, entry.shape)) is not None:
            made = replace(made, order=None if is_sorted(order) else order)
        elif len(entries) == 1 and (offset := number_added(self._processor, entry.name, entry.shape)) is not None:
            made = replace(made, dtype="F32", offset=offset)
        else:
            if expected is not None and elements == math.prod(expected) and self._may_reshape(entry):
                made = replace(made, shape=expected)
            made = replace(made, dtype="F32", convert=partial(convert, self._processor, self._names, name))
        return made if made.dtype in PLAIN else replace(made, dtype="F32")

    def _may_reshape(self, entry: TensorEntry) -> bool:
        """Return whether a processor makes another shape: rows for columns, one dimension more, two matrices in one."""
        return self._architecture == "gpt2" or bool(_RESHAPED.search(entry.name))


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


def _notes(file: Path, left_out: Sequence[str]) -> tuple[str, ...]:
    """Return the line about tensors that are no part of the decoder, none where there are no such tensors."""
    if not left_out:
        return ()
    more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return (
        f"{file.name}: left out, as no part of the decoder: layers that guess further tokens "
        f"({shown(left_out[0])}{more})",
    )
