"""A LLaMA checkpoint as an OpenVINO model: the graph that optimum-intel makes, and weights as NNCF compresses them.

Its KV cache is its state. Inputs are `tokens` [batch, tokens], `positions` [1, tokens] and `beams` int32 [batch] (which
sequence each continues; the CPU plugin fuses cache and attention only with it); the output is `logits` [batch, vocab]
of the last token. Matrices are

| format | |
| --- | --- |
| f16 | float16 |
| q8 | int8, one float16 scale for each row |
| q4 | int4, one float16 scale for 32 columns, as q4_0 |

The embedding is float16 in all; a token reads one row of it.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from numpy.typing import NDArray
from openvino.op.util import Variable, VariableInfo
from safetensors import safe_open

Array = NDArray[Any]
Node = Any
_GROUP = 32


def export(model: Path, output: Path, format: str) -> None:
    """Writes the checkpoint in the folder `model` to `output` (.xml, and .bin beside it)."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="numpy")) for path in _files(model)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        config = json.loads((model / "config.json").read_text())
        graph = _Llama(config, lambda name: where[name].get_tensor(name), format).model()
    unfinished = output.with_name(f"unfinished-{output.name}")
    ov.save_model(graph, unfinished, compress_to_fp16=True)
    unfinished.with_suffix(".bin").replace(output.with_suffix(".bin"))
    unfinished.replace(output)


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("model*.safetensors"))


class _Llama:
    def __init__(self, config: dict[str, Any], read: Any, format: str) -> None:
        self._config, self._read, self._format = config, read, format
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head_dim = config.get("head_dim") or config["hidden_size"] // self._heads
        self._assigned: list[Node] = []

    def model(self) -> ov.Model:
        tokens = ops.parameter([-1, -1], np.int64, name="tokens")
        positions = ops.parameter([1, -1], np.int64, name="positions")
        beams = ops.parameter([-1], np.int32, name="beams")
        self._tokens, self._beams = tokens, beams
        cos, sin = self._rotation(positions)
        mask = self._mask(positions)
        x = ops.gather(self._floats("model.embed_tokens.weight"), tokens, _int(0))
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = ops.add(x, self._attention(layer, self._norm(x, f"{name}.input_layernorm"), cos, sin, mask))
            x = ops.add(x, self._ffn(f"{name}.mlp", self._norm(x, f"{name}.post_attention_layernorm")))
        last = ops.gather(self._norm(x, "model.norm"), _int(-1), _int(1))
        head = "model.embed_tokens" if self._config["tie_word_embeddings"] else "lm_head"
        logits = ops.result(self._linear(last, head), name="logits")
        return ov.Model([logits], self._assigned, [tokens, positions, beams], "llama")

    def _attention(self, layer: int, x: Node, cos: Node, sin: Node, mask: Node) -> Node:
        name = f"model.layers.{layer}.self_attn"
        q = _rotate(self._split(self._linear(x, f"{name}.q_proj"), self._heads), cos, sin, self._head_dim)
        k = _rotate(self._split(self._linear(x, f"{name}.k_proj"), self._kv_heads), cos, sin, self._head_dim)
        v = self._split(self._linear(x, f"{name}.v_proj"), self._kv_heads)
        k, v = self._cached(f"k.{layer}", k), self._cached(f"v.{layer}", v)
        mixed = ops.scaled_dot_product_attention(q, self._repeated(k), self._repeated(v), mask)
        merged = ops.reshape(ops.transpose(mixed, _ints(0, 2, 1, 3)), _ints(0, 0, self._heads * self._head_dim), True)
        return self._linear(merged, f"{name}.o_proj")

    def _ffn(self, name: str, x: Node) -> Node:
        gate = ops.relu(self._linear(x, f"{name}.gate_proj"))
        return self._linear(ops.multiply(gate, self._linear(x, f"{name}.up_proj")), f"{name}.down_proj")

    def _split(self, x: Node, heads: int) -> Node:
        """[batch, tokens, heads · head_dim] → [batch, heads, tokens, head_dim]."""
        return ops.transpose(ops.reshape(x, _ints(0, 0, heads, self._head_dim), True), _ints(0, 2, 1, 3))

    def _cached(self, name: str, new: Node) -> Node:
        """Append `new` to the state of this name, and return the whole."""
        batch = ops.gather(ops.shape_of(self._tokens), _ints(0), _int(0))
        empty = ops.concat([batch, _ints(self._kv_heads, 0, self._head_dim)], 0)
        start = ops.broadcast(ops.constant(np.float32(0)), empty)
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, self._kv_heads, -1, self._head_dim])
        info.data_type, info.variable_id = ov.Type.f32, name
        variable = Variable(info)
        past = ops.gather(ops.read_value(start, variable), self._beams, _int(0))
        whole = ops.concat([past, new], 2)
        self._assigned.append(ops.assign(whole, variable))
        return whole

    def _repeated(self, x: Node) -> Node:
        """Each key or value head once for every query head that reads it."""
        if self._heads == self._kv_heads:
            return x
        times = _ints(1, 1, self._heads // self._kv_heads, 1, 1)
        wide = ops.broadcast(ops.unsqueeze(x, _int(2)), times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, _ints(0, self._heads, -1, self._head_dim), True)

    def _norm(self, x: Node, name: str) -> Node:
        mean = ops.reduce_mean(ops.power(x, np.float32(2)), _ints(-1), keep_dims=True)
        root = ops.sqrt(ops.add(mean, np.float32(self._config["rms_norm_eps"])))
        return ops.multiply(self._floats(f"{name}.weight"), ops.multiply(x, ops.divide(np.float32(1), root)))

    def _rotation(self, positions: Node) -> tuple[Node, Node]:
        """cos and sin, each [1, 1, tokens, head_dim]."""
        exponents = np.arange(0, self._head_dim, 2) / self._head_dim
        angles = np.arange(self._config["max_position_embeddings"])[:, None] * self._config["rope_theta"] ** -exponents
        both = np.concatenate([angles, angles], axis=1)
        tables = (ops.constant(table.astype(np.float32)) for table in (np.cos(both), np.sin(both)))
        cos, sin = (ops.unsqueeze(ops.gather(table, positions, _int(0)), _int(1)) for table in tables)
        return cos, sin

    def _mask(self, positions: Node) -> Node:
        """0 where a token may look and -inf where it may not, [1, 1, tokens, tokens of the cache]."""
        last = ops.squeeze(ops.gather(positions, _int(-1), _int(1)))
        columns = ops.range(_int(0), ops.add(last, _int(1)), _int(1), output_type="i64")
        is_behind = ops.less_equal(columns, ops.unsqueeze(positions, _ints(1, 3)))
        return ops.select(is_behind, np.float32(0), np.finfo(np.float32).min)

    def _floats(self, name: str) -> Node:
        return ops.constant(self._read(name).astype(np.float32))

    def _linear(self, x: Node, name: str) -> Node:
        weight = self._read(f"{name}.weight").astype(np.float32)
        columns = weight.shape[1]
        if self._format == "q8":
            matrix = _quantized(weight, -128, ov.Type.i8)
        elif self._format == "q4" and columns % _GROUP == 0:
            grouped = _quantized(weight.reshape(len(weight), -1, _GROUP), -8, ov.Type.i4)
            matrix = ops.reshape(grouped, _ints(len(weight), columns), False)
        else:
            return ops.matmul(x, ops.constant(weight), False, True)
        return ops.matmul(x, ops.convert(matrix, "f32"), False, True)


def _quantized(weight: Array, least: int, kind: ov.Type) -> Node:
    """Integers from `least` on times one float16 scale for each last axis; int4 as ggml's q4_0 has them.

    The number that is largest in magnitude becomes `least`, whatever its sign.
    """
    largest = np.take_along_axis(weight, np.abs(weight).argmax(axis=-1)[..., None], axis=-1)
    scale = (largest / least).astype(np.float16)
    units = np.divide(weight, scale, where=scale != 0, out=np.zeros_like(weight), dtype=np.float32)
    numbers = np.clip(np.rint(units), least, -least - 1).astype(np.int8)
    if kind == ov.Type.i4:
        pairs = (numbers.reshape(-1, 2) & 0xF).astype(np.uint8)
        constant = ov.op.Constant(ov.Tensor(pairs[:, 0] | pairs[:, 1] << 4, ov.Shape(weight.shape), kind), False)
    else:
        constant = ov.op.Constant(numbers)
    return ops.multiply(ops.convert(constant, "f16"), ops.constant(scale))


def _rotate(x: Node, cos: Node, sin: Node, head_dim: int) -> Node:
    """x · cos + (−second half, first half) · sin."""
    first, second = ops.variadic_split(x, _int(-1), _ints(head_dim // 2, head_dim // 2)).outputs()
    turned = ops.concat([ops.multiply(second, np.float32(-1)), first], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))


def _int(value: int) -> Node:
    return ops.constant(np.int64(value))


def _ints(*values: int) -> Node:
    return ops.constant(np.array(values, np.int64))
