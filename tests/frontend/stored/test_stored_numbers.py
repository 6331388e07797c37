"""FP8, compressed-tensors and bitsandbytes: every kind against its definition in float64, and what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.quantized_files import save_made
from helpers.quantized_numbers import KINDS
from picompile.errors import UnsupportedModelError
from picompile.frontend.checkpoint import read_headers
from picompile.frontend.model_file import read_config
from picompile.frontend.stored import StoredMatrices, find_method
from picompile_passes.formats.packing import dequantize_rows

# A row of the last one's blocks has as many scales as it has rows.
SHAPES = {"model.layers.0.mlp.up_proj": (64, 96), "lm_head": (33, 320), "gate": (32, 1024)}
REPACKED = dict.fromkeys(("packed-4", "packed-4-channel", "packed-3-zeros"), ("q8", "q4m", "q4"))
REPACKED |= dict.fromkeys(("packed-4-zeros", "packed-4-plain-zeros"), ("q8", "q4m"))
REPACKED |= dict.fromkeys(("packed-8", "int-channel", "int-tensor", "int-group", "llm-int8"), ("q8",))
FP8 = ("fp8-blocks", "fp8-powers", "fp8-matrix", "modelopt", "fbgemm", "float-channel", "float-block")
REPACKED |= dict.fromkeys(FP8, ("fp8",))
REPACKED |= {"nvfp4": ("nvfp4",), "mxfp4": ("mxfp4",), "nf4": ("nf4",), "nf4-nested": ("nf4",)}
# These formats keep all weights; a kind that is not named has none.
STORED = {name: forms[-1] for name, forms in REPACKED.items()}


def opened(folder: Path) -> StoredMatrices:
    method = find_method(read_config(folder))
    assert method is not None
    return StoredMatrices(method, read_headers(folder))


def change(folder: Path, change_it: Callable[[dict[str, Tensor]], object]) -> None:
    """Save the tensors of a folder again, changed."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change_it(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    weights = save_made(tmp_path, kind.make, kind.config, SHAPES)
    tensors = opened(tmp_path)
    assert set(tensors.headers) == {*weights, "norm.weight"} and tensors.notes == ()
    for parameter, expected in weights.items():
        header = tensors.headers[parameter]
        assert (header.dtype, header.shape, header.quantized) == ("F32", tuple(expected.shape), True)
        found = tensors.load(parameter)
        rounding = 2.0**-23 if name in ("llm-int8", "nf4-nested") else 0
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=0)
        assert tensors.stored_format(parameter) == STORED.get(name)
        for form in ("q8", "q4m", "q4", "nvfp4", "mxfp4", "fp8", "nf4"):
            packed = tensors.packed(parameter, form)
            assert (packed is not None) == (form in REPACKED.get(name, ())), form
            if packed is not None:
                # Scales of LLM.int8() are float32, over 127, and those of double quantization sums of products.
                rounding = 2.0**-11 if name in ("llm-int8", "nf4-nested") else 0
                unpacked = dequantize_rows(packed, form, expected.shape[1])
                torch.testing.assert_close(unpacked, found, rtol=rounding, atol=0)


def test_rows_of_zeros_and_small_ones_keep_a_matrix(tmp_path: Path) -> None:
    """Tools give a row of zeros a scale of next to nothing, and scales of small rows are far below a float16's."""
    kind = KINDS["fbgemm"]
    save_made(tmp_path, kind.make, kind.config, {"up": (32, 64)})

    def shrink(tensors: dict[str, Tensor]) -> None:
        tensors["up.weight"][3] = 0
        tensors["up.weight_scale"][3] = 1e-12
        tensors["up.weight_scale"][5] *= 2.0**-9

    change(tmp_path, shrink)
    found = opened(tmp_path)
    packed, expected = found.packed("up.weight", "fp8"), found.load("up.weight")
    assert found.stored_format("up.weight") == "fp8" and packed is not None
    unpacked = dequantize_rows(packed, "fp8", 64)
    assert bool(expected[5].any()) and not bool(expected[3].any())
    torch.testing.assert_close(unpacked, expected, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
def test_scales_beyond_float16_have_no_format(tmp_path: Path, factor: float) -> None:
    kind = KINDS["fbgemm"]
    save_made(tmp_path, kind.make, kind.config, {"up": (32, 64)})
    change(tmp_path, lambda tensors: tensors.update({"up.weight_scale": tensors["up.weight_scale"] * factor}))
    assert opened(tmp_path).stored_format("up.weight") is None


def test_modules_of_other_kinds_and_floats_are_beside_each_other(tmp_path: Path) -> None:
    """Each of several config groups is known from its tensors, and what `ignore` names is as it is."""
    names = ("packed-4", "packed-8", "float-channel", "nvfp4")
    groups = {f"group_{n}": dict(KINDS[name].config["config_groups"]["group_0"]) for n, name in enumerate(names)}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    shapes = {f"m{number}": (32, 64) for number in range(len(names))}
    weights = save_made(tmp_path, lambda o, i, s: KINDS[names[s]].make(o, i, s), {**config, "ignore": ["head"]}, shapes)
    change(tmp_path, lambda tensors: tensors.update({"head.weight": torch.ones(4, 4, dtype=torch.bfloat16)}))
    found = opened(tmp_path)
    assert all(torch.equal(found.load(name).double(), weight) for name, weight in weights.items())
    assert found.headers["head.weight"].dtype == "BF16" and not found.is_quantized("head.weight")


def test_scales_of_activations_are_left_out_with_a_note(tmp_path: Path) -> None:
    kind = KINDS["fp8-matrix"]
    save_made(tmp_path, kind.make, kind.config, {"up": (32, 64)})
    more = {name: torch.ones(1) for name in ("up.input_scale", "up.output_scale")}
    change(tmp_path, lambda tensors: tensors.update(more))
    found = opened(tmp_path)
    assert set(found.headers) == {"up.weight", "norm.weight"}
    assert found.notes == ("activations are not rounded, as 2 tensors such as up.input_scale would have it",)


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"up.{name}")


def _as(name: str, changed: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"up.{name}": changed(tensors[f"up.{name}"])})


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _text(text: str) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "change_it", "says"),
    [
        ("fp8-blocks", _drop("weight_scale_inv"), "holds up.weight, but no up.weight_scale_inv"),
        (
            "fp8-blocks",
            _as("weight_scale_inv", lambda t: t[:-1]),
            "but a matrix of [64, 96] needs [1, 1] or [64, 1] or",
        ),
        ("fp8-blocks", _as("weight_scale_inv", lambda t: t.int()), "up.weight_scale_inv is I32"),
        ("fp8-blocks", _as("weight_scale_inv", lambda t: t / 0), "up.weight_scale_inv has NaN or infinite values"),
        ("fp8-blocks", _as("weight", lambda t: t[None]), "up.weight is [1, 64, 96]; a matrix is read"),
        ("fp8-blocks", lambda t: t.update({"up.weight_scale": torch.ones(1)}), "two scales"),
        ("packed-4", _drop("weight_scale"), "holds up.weight_packed, but no up.weight_scale"),
        ("packed-4", _drop("weight_shape"), "holds up.weight_packed, but no up.weight_shape"),
        ("packed-4", _as("weight_shape", lambda t: t[:1]), "which are no [64] integers of 4 bits"),
        ("packed-4", _as("weight_shape", lambda t: t + 8), "which are no [72, 104] integers of 4 bits"),
        ("packed-4", _as("weight_packed", lambda t: t.long()), "up.weight_packed is I64; I32 or U8 is read"),
        ("packed-4", _as("weight_scale", lambda t: t[:, :-1]), "up.weight_scale is [64, 2], but a matrix of [64, 96]"),
        (
            "packed-4",
            lambda t: t.update({"up.weight": torch.ones(64, 96)}),
            "holds up.weight and up.weight_packed: two",
        ),
        (
            "packed-4-zeros",
            _as("weight_zero_point", lambda t: t[:-1]),
            "up.weight_zero_point is [7, 3]; [64, 96] needs",
        ),
        ("packed-4-plain-zeros", _as("weight_zero_point", lambda t: t[:-1]), "[63, 3]; [64, 96] needs [64, 3]"),
        ("packed-4-order", _drop("weight_g_idx"), "no up.weight_g_idx, which actorder in quantization_config asks for"),
        ("packed-4-order", _as("weight_g_idx", lambda t: t + 1), "up.weight_g_idx names groups that there are not"),
        ("int-zeros", _as("weight_zero_point", lambda t: t[:-1]), "up.weight_zero_point is unlike its scales"),
        ("int-group", lambda t: t.update({"up.weight_g_idx": torch.zeros(96).int()}), "read of packed integers alone"),
        ("nvfp4", _as("weight_global_scale", lambda t: torch.ones(2)), "up.weight_global_scale is [2]"),
        ("nvfp4", _drop("weight_global_scale"), "up.weight_scale is F8_E4M3; U8 or F8_E8M0 is read"),
        ("nf4", _drop(_STATE), "up needs one of weight.quant_state.bitsandbytes__nf4 and"),
        ("nf4", _as(_STATE, _text("{}")), "has no JSON of bitsandbytes with shape and blocksize"),
        ("nf4", _as(_STATE, _text("[" * 60000)), "has no JSON of bitsandbytes with shape and blocksize"),
        ("nf4", _as(_STATE, _text('{"shape": [64, -96], "blocksize": 64}')), "has no JSON of bitsandbytes"),
        (
            "nf4",
            _as(_STATE, _text('{"shape": [64, 95], "blocksize": 64}')),
            "up.weight.absmax has 96 numbers, but [64, 95]",
        ),
        ("nf4", _as("weight", lambda t: t[:-1]), "up.weight has 3071 numbers, but [64, 96] in blocks of 64 need 3072"),
        ("nf4", _as("weight.absmax", lambda t: t / 0), "up.weight.absmax has NaN or infinite values"),
        ("nf4", _as("weight.quant_map", lambda t: t[:-1]), "up.weight.quant_map has 15 numbers"),
        ("nf4-nested", _drop("weight.nested_quant_map"), "but no up.weight.nested_quant_map"),
        ("llm-int8", _as("SCB", lambda t: t[:-1]), "up.SCB is [63], but [64, 96] needs [64]"),
        ("llm-int8", _as("weight", lambda t: t.half()), "up.weight is F16; I8 is read"),
        ("llm-int8", _as("weight_format", lambda t: t + 2), "up.weight_format is not row"),
    ],
)
def test_damaged_checkpoints(
    tmp_path: Path, kind: str, change_it: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    save_made(tmp_path, KINDS[kind].make, KINDS[kind].config, {"up": (64, 96)})
    change(tmp_path, change_it)
    with pytest.raises(UnsupportedModelError) as caught:
        opened(tmp_path).load("up.weight")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_matrices_without_settings_are_refused(tmp_path: Path) -> None:
    for name, says in (("int-channel", "needs settings of its weights"), ("packed-4", "integers of no bits")):
        save_made(tmp_path, KINDS[name].make, {**KINDS[name].config, "config_groups": {}}, {"up": (64, 96)})
        with pytest.raises(UnsupportedModelError, match=says):
            opened(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_may_lie_in_other_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    """bitsandbytes stores its bytes as floats where FSDP asks for that."""
    weights = save_made(tmp_path, KINDS["nf4"].make, KINDS["nf4"].config, {"up": (64, 96)})
    change(tmp_path, _as("weight", lambda t: t.view(-1).view(dtype).view(-1, 1)))
    assert torch.equal(opened(tmp_path).load("up.weight").double(), weights["up.weight"])


_ODD = (None, -1, 0, 16, 10**30, 1.5, True, "", "x", [], [1, 2], {}, {"a": 1})


def _settings(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items() if isinstance(config, dict) else ():
        yield (*path, key)
        yield from _settings(value, (*path, key))


def _changed(config: Any, path: tuple[str, ...], value: Any) -> Any:
    key, *rest = path
    return {**config, key: _changed(config[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("name", ["fp8-blocks", "packed-4-zeros", "float-block", "nf4"])
def test_odd_settings_are_refused_or_have_no_effect(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    weight = save_made(tmp_path, kind.make, kind.config, {"up": (32, 64)})["up.weight"]
    headers = read_headers(tmp_path)
    for path in list(_settings(kind.config)):
        for value in _ODD:
            try:
                method = find_method({"quantization_config": _changed(kind.config, path, value)})
                assert method is not None
                found = StoredMatrices(method, headers).load("up.weight")
            except UnsupportedModelError as error:
                assert "\n" not in str(error)
            else:
                assert torch.equal(found.double(), weight), (path, value)
