"""Checkpoints whose matrices are integers of GPTQ or AWQ: read one matrix at a time, as float32 or as rows of ours."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.quantized_codes import CodeLayout, QuantizedMatrix
from picompile.frontend.tensor_file import TensorHeader, read_tensor
from picompile_passes.formats import COARSE_BITS, FORMATS, GROUP
from picompile_passes.formats.packing import data_bytes

_SUFFIX = ".qweight"
_PARTS = ("qweight", "qzeros", "scales")
_SCALE_DTYPES = ("F16", "BF16", "F32")
# Inputs that are unpacked at a time; a multiple of the integers in a word.
_STEP = 256


def find_layout(raw: Mapping[str, Any]) -> CodeLayout | None:
    """Return how the checkpoint with the config.json `raw` is quantized, None where it is not.

    Raises `UnsupportedModelError`, naming it, for a method or a variant that is not read.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise _unsupported(quantization)
    method = quantization.get("quant_method", "unknown")
    if method not in ("gptq", "awq"):
        raise _unsupported(method)
    bits, group_size = quantization.get("bits", quantization.get("w_bit")), quantization.get("group_size", 128)
    if type(bits) is not int or bits not in ((4, 8) if method == "gptq" else (4,)):
        raise _unsupported(f"{method} with {bits!r:.20} bits")
    if type(group_size) is not int or not (group_size == -1 or (8 <= group_size <= 1 << 20 and group_size % 8 == 0)):
        raise _unsupported(f"{method} with groups of {group_size!r:.20}")
    if method == "awq":
        if (
            str(quantization.get("version", "gemm")).lower() != "gemm"
            or quantization.get("zero_point", True) is not True
        ):
            raise _unsupported(f"awq of version {quantization.get('version', 'gemm')!r:.20}, or without zero_point")
        form = quantization.get("checkpoint_format") or quantization.get("format") or "gemm"
        if str(form).lower() != "gemm":
            raise _unsupported(f"awq in the format {form!r:.40}")
        return CodeLayout("awq", bits, group_size, less_one=False, plain=False)
    form = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or quantization.get("is_marlin_format") or quantization.get("dynamic"):
        odd = "dynamic bits" if form in ("gptq", "gptq_v2") and quantization.get("dynamic") else f"{form!r:.40}"
        raise _unsupported(f"gptq in the format {odd}")
    for key, usual in (("pack_dtype", "int32"), ("rotation", None), ("adapter", None)):
        if (value := quantization.get(key)) and value != usual:
            raise _unsupported(f"gptq with {key} {value!r:.40}")
    ordered = bool(quantization.get("desc_act", False))
    plain = quantization.get("sym", True) is True and not ordered
    return CodeLayout("gptq", bits, group_size, less_one=form == "gptq", plain=plain, ordered=ordered)


def _unsupported(method: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the checkpoint is quantized ({str(method)[:60]}); read are gptq of 4 and 8 bits and awq of 4 bits (gemm); "
        "use the original, unquantized one"
    )


class QuantizedTensors:
    """The tensors of a quantized checkpoint, as if it were not.

    `headers` has NAME.weight, F32 [outputs, inputs], in place of NAME.qweight, NAME.qzeros, NAME.scales and NAME.g_idx,
    and all other tensors as they are.
    """

    def __init__(self, layout: CodeLayout, stored: Mapping[str, TensorHeader]) -> None:
        """Check `stored`, the headers of the checkpoint's files; `UnsupportedModelError` for shapes that do not fit."""
        self.layout = layout
        self._stored = dict(stored)
        self._modules = [name.removesuffix(_SUFFIX) for name in stored if name.endswith(_SUFFIX)]
        parts = {f"{module}.{part}" for module in self._modules for part in (*_PARTS, "g_idx")}
        self.headers = {name: header for name, header in stored.items() if name not in parts}
        for module in self._modules:
            header = self._describe(module)
            if f"{module}.weight" in stored:
                raise UnsupportedModelError(f"{header.file}: holds {module}.weight and {module}{_SUFFIX}: two weights")
            self.headers[f"{module}.weight"] = header

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor `name` is a matrix of integers; `load` and `packed` are for these alone."""
        return name in self.headers and name not in self._stored

    def load(self, name: str) -> Tensor:
        """Return NAME.weight, float32 [outputs, inputs]: (code - zero) × scale, exact where scales are float16.

        Raises `UnsupportedModelError` for files that cannot be read, groups that there are not, and scales that are NaN
        or infinite.
        """
        matrix = self._read(name)
        zeros, scales = matrix.zeros(), matrix.scales.to(torch.float32)
        values = torch.empty(matrix.outputs, matrix.inputs, dtype=torch.float32)
        for start, stop in _steps(matrix.inputs):
            group_scales = scales[matrix.groups[start:stop]]
            values[:, start:stop] = (matrix.codes(zeros, start, stop).to(torch.float32) * group_scales).T
        return values

    def packed(self, name: str, format_name: str) -> Tensor | None:
        """Return the rows of NAME.weight in q8 or q4, uint8 [outputs, row bytes], where that is exact; else None.

        It is where 32 columns side by side are of one group, scales are float16, and every code - zero is a number of
        the format: symmetric 4-bit matrices in q4, all 4-bit matrices in q8. Raises as `load` does.
        """
        header, form = self.headers[name], FORMATS[format_name]
        # A format's zeros, tables and planes are not those of the checkpoint.
        if form.data_bits not in (4, 8) or form.zero is None or form.table or header.shape[1] % GROUP:
            return None
        matrix = self._read(name)
        by_group = matrix.groups.view(-1, GROUP)
        if matrix.scales.dtype != torch.float16 or not bool((by_group == by_group[:, :1]).all()):
            return None
        zeros, own_zero = matrix.zeros(), int(form.zero)
        packed = torch.zeros(matrix.outputs, form.row_bytes(matrix.inputs), dtype=torch.uint8)
        for start, stop in _steps(matrix.inputs):
            codes = matrix.codes(zeros, start, stop).T.reshape(matrix.outputs, -1, GROUP)
            low, high = torch.aminmax(codes)
            if int(low) + own_zero < form.lowest or int(high) + own_zero > form.highest:
                return None
            data = data_bytes(codes + own_zero, form).reshape(matrix.outputs, -1)
            at = start * form.data_bits // 8
            packed[:, at : at + data.shape[1]] = data
        offset, count = form.scale_offset_bytes(matrix.inputs), matrix.inputs // GROUP
        scales = matrix.scales[by_group[:, 0]].T.contiguous()
        packed[:, offset : offset + 2 * count] = scales.view(torch.uint8)
        return packed

    def rounds_again(self, format_name: str) -> str | None:
        """Return AWQ or GPTQ where a format of 4 bits rounds matrices of 4 bits a second time, else None.

        It does where each group has a zero of its own, or groups are not of columns side by side.
        """
        again = FORMATS[format_name].bits <= COARSE_BITS and self.layout.bits == 4 and not self.layout.plain
        return self.layout.method.upper() if again else None

    def without_zero_biases(self, expected: Container[str]) -> dict[str, TensorHeader]:
        """Return `headers` but for biases that are zero and not among the names `expected`.

        Old versions of AutoGPTQ wrote one beside every matrix.
        """
        biases = [name for name in (f"{module}.bias" for module in self._modules) if name in self.headers]
        unwanted = {name for name in biases if name not in expected and not bool(self._tensor(name).any())}
        return {name: header for name, header in self.headers.items() if name not in unwanted}

    def _describe(self, module: str) -> TensorHeader:
        """Check the shapes of a matrix's tensors against each other, and return the header of its weight."""
        file = self._stored[module + _SUFFIX].file
        found = {part: self._stored.get(f"{module}.{part}") for part in (*_PARTS, "g_idx")}
        for part in _PARTS:
            if found[part] is None:
                raise UnsupportedModelError(f"{file}: holds {module}{_SUFFIX}, but no {module}.{part}")
        if self.layout.ordered and self.layout.group_size != -1 and found["g_idx"] is None:
            raise UnsupportedModelError(f"{file}: no {module}.g_idx, which desc_act in quantization_config asks for")
        shapes = {part: header.shape for part, header in found.items() if header is not None}
        dtypes = {part: header.dtype for part, header in found.items() if header is not None}
        if any(dtype != "I32" for part, dtype in dtypes.items() if part != "scales"):
            raise UnsupportedModelError(f"{file}: the integers of {module} are {dtypes['qweight']}; I32 is read")
        if dtypes["scales"] not in _SCALE_DTYPES or any(len(shapes[part]) != 2 for part in _PARTS):
            raise UnsupportedModelError(f"{file}: {module}.scales is {dtypes['scales']} {list(shapes['scales'])}")
        rows, columns = shapes["qweight"]
        per_word = self.layout.per_word
        awq = self.layout.method == "awq"
        inputs, outputs = (rows, columns * per_word) if awq else (rows * per_word, columns)
        groups = 1 if self.layout.group_size == -1 else -(-inputs // self.layout.group_size)
        needed = {"qzeros": (groups, -(-outputs // per_word)), "scales": (groups, outputs), "g_idx": (inputs,)}
        for part, shape in needed.items():
            if (part in shapes and shapes[part] != shape) or 0 in shape or (part == "qzeros" and outputs % per_word):
                raise UnsupportedModelError(
                    f"{file}: {module}.{part} is {list(shapes.get(part, ()))}, but integers {[rows, columns]} in "
                    f"groups of {self.layout.group_size} need {list(shape)}"
                )
        return TensorHeader(file, "F32", (outputs, inputs), f"{module}.weight")

    def _read(self, name: str) -> QuantizedMatrix:
        if not self.is_quantized(name):
            raise KeyError(name)
        module, header = name.removesuffix(".weight"), self.headers[name]
        qweight, qzeros, scales = (self._tensor(f"{module}.{part}") for part in _PARTS)
        inputs = header.shape[1]
        size = inputs if self.layout.group_size == -1 else self.layout.group_size
        groups = torch.arange(inputs) // size
        if self.layout.method == "gptq" and f"{module}.g_idx" in self._stored:
            groups = self._tensor(f"{module}.g_idx").to(torch.int64)
        if not bool(((groups >= 0) & (groups < len(scales))).all()):
            raise UnsupportedModelError(f"{header.file}: {module}.g_idx names groups that there are not")
        if not bool(torch.isfinite(scales).all()):
            raise UnsupportedModelError(f"{header.file}: {module}.scales has NaN or infinite values: it is damaged")
        return QuantizedMatrix(self.layout, qweight, qzeros, scales, groups)

    def _tensor(self, name: str) -> Tensor:
        return read_tensor(self._stored[name].file, name)


def _steps(inputs: int) -> Iterator[tuple[int, int]]:
    return ((start, min(inputs, start + _STEP)) for start in range(0, inputs, _STEP))
