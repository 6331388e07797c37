"""GPTQ, AWQ and AutoRound: every layout against the formula in float64, exact repacking, and zeros against labels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.quantized_files import Scheme, quantized_matrix, save_made, save_quantized, stream
from picompile.errors import UnsupportedModelError
from picompile.frontend.checkpoint import read_headers
from picompile.frontend.model_file import read_config
from picompile.frontend.stored import StoredMatrices, find_method
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows

SCHEMES = {
    "gptq": Scheme(),
    "gptq-sym": Scheme(sym=True),
    "gptq-v2": Scheme(checkpoint_format="gptq_v2"),
    "gptq-2": Scheme(bits=2),
    "gptq-2-order": Scheme(bits=2, desc_act=True),
    "gptq-3": Scheme(bits=3),
    "gptq-3-v2": Scheme(bits=3, checkpoint_format="gptq_v2"),
    "gptq-3-sym": Scheme(bits=3, sym=True),
    "gptq-8": Scheme(bits=8),
    "gptq-8-sym": Scheme(bits=8, sym=True),
    "gptq-order": Scheme(desc_act=True),
    "gptq-one-group": Scheme(group_size=-1),
    "gptq-large-groups": Scheme(group_size=128, scale_dtype=torch.bfloat16),
    "awq": Scheme("awq"),
    "awq-float32": Scheme("awq", group_size=64, scale_dtype=torch.float32),
    "auto-round": Scheme("auto-round", checkpoint_format="auto_round"),
    "auto-round-gptq": Scheme("auto-round", bits=3, checkpoint_format="auto_round:auto_gptq"),
    "auto-round-awq": Scheme("auto-round", checkpoint_format="auto_round:auto_awq"),
}
# Formats that have all codes of up to 4 bits with any zero, and of 4 bits with a zero in the middle or 3 bits with any.
FOUR, THREE = ("q8", "q6", "q4m"), ("q8", "q6", "q4m", "q4")
REPACKED = dict.fromkeys(("gptq", "gptq-v2", "gptq-one-group", "gptq-large-groups"), FOUR)
REPACKED |= dict.fromkeys(("awq", "awq-float32", "auto-round", "auto-round-awq"), FOUR)
REPACKED["gptq-8-sym"] = ("q8",)
REPACKED |= dict.fromkeys(("gptq-sym", "gptq-2", "gptq-3", "gptq-3-v2", "gptq-3-sym", "auto-round-gptq"), THREE)
# These formats keep all weights. Inputs in any order of groups have none, nor have 8 bits with zeros of their own.
STORED: dict[str, str | None] = {name: forms[-1] for name, forms in REPACKED.items()}
STORED |= dict.fromkeys(("gptq-8", "gptq-order", "gptq-2-order"))
SHAPES = {"model.layers.0.mlp.up_proj": (64, 96), "lm_head": (32, 352)}


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


@pytest.mark.parametrize("name", SCHEMES)
def test_every_layout(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    weights = save_quantized(tmp_path, scheme, SHAPES)
    tensors = opened(tmp_path)
    assert set(tensors.headers) == {*weights, "norm.weight"}
    assert tensors.headers["norm.weight"].dtype == "F16" and not tensors.is_quantized("norm.weight")
    for parameter, expected in weights.items():
        assert tensors.is_quantized(parameter)
        assert (tensors.headers[parameter].dtype, tensors.headers[parameter].shape) == ("F32", tuple(expected.shape))
        found = tensors.load(parameter)
        # A float16 has 11 bits and a difference of integers 9: together they fit into a float32.
        exact = scheme.scale_dtype != torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0 if exact else 1e-7, atol=0)
        assert tensors.stored_format(parameter) == STORED[name]
        # Rows are repacked where that rounds nothing but scales of float32.
        for form in ("q8", "q6", "q4m", "q4", "f16", "mxfp4"):
            packed = tensors.packed(parameter, form)
            assert (packed is not None) == (form in REPACKED.get(name, ())), form
            if packed is not None:
                outputs, inputs = expected.shape
                assert packed.shape == (outputs, FORMATS[form].row_bytes(inputs))
                rounding = 0 if exact else 2.0**-11
                torch.testing.assert_close(dequantize_rows(packed, form, inputs), found, rtol=rounding, atol=0)


def test_what_is_rounded_a_second_time(tmp_path: Path) -> None:
    for name, said in (("awq", "AWQ"), ("gptq-sym", None), ("gptq", "GPTQ")):
        save_quantized(tmp_path, SCHEMES[name], SHAPES)
        assert [opened(tmp_path).rounds_again(form) for form in ("q4", "q4m", "q8")] == [said, None, None]
    # Numbers decide, not what a config says of them.
    save_quantized(tmp_path, Scheme(sym=True, centred=False), SHAPES)
    assert opened(tmp_path).rounds_again("q4") == "GPTQ"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_zeros_decide_how_they_are_stored(tmp_path: Path, bits: int, label: str) -> None:
    """Tools write gptq_v2's zeros and say gptq (vllm-project/vllm#38966)."""
    scheme = Scheme(bits=bits, sym=True, checkpoint_format=label, less_one=label != "gptq")
    weights = save_quantized(tmp_path, scheme, SHAPES)
    found = opened(tmp_path)
    assert all(torch.equal(found.load(name).double(), weight) for name, weight in weights.items())
    assert len(found.notes) == 1 and found.notes[0].startswith("the zeros of 2 of 2 matrices are stored ")


def test_some_matrices_may_be_labelled_wrong(tmp_path: Path) -> None:
    right, wrong = Scheme(sym=True), Scheme(sym=True, less_one=False)
    weights = save_made(tmp_path, lambda o, i, s: (wrong if s else right).make(o, i, s), right.config, SHAPES)
    found = opened(tmp_path)
    assert all(torch.equal(found.load(name).double(), weight) for name, weight in weights.items())
    assert found.notes == (
        "the zeros of 1 of 2 matrices are stored as they are, as their values show, and not less 1, as "
        "quantization_config says",
    )


def test_zeros_that_deny_their_label(tmp_path: Path) -> None:
    weights = save_quantized(tmp_path, Scheme(sym=True, centred=False), SHAPES)
    found = opened(tmp_path)
    assert all(torch.equal(found.load(name).double(), weight) for name, weight in weights.items())
    assert found.notes == ("2 of 2 matrices have zeros of their own, though quantization_config says sym",)
    change(tmp_path, lambda tensors: [tensors[name].zero_() for name in tensors if name.endswith("qzeros")])
    with pytest.raises(
        UnsupportedModelError, match=r"are all 0, but sym in quantization_config asks for 8, or 7 where"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("less_one", [True, False])
def test_zeros_of_their_own_that_move_all_weights_are_refused(tmp_path: Path, less_one: bool) -> None:
    """Codes around their zeros, as trained weights have them, tell which of the formats a file has."""
    draw = torch.Generator().manual_seed(5)
    zeros = torch.randint(5, 11, (4, 512), generator=draw)
    spread = torch.randn(128, 512, generator=draw) * 2
    codes = (zeros.repeat_interleave(32, dim=0) + spread).round().clamp(0, 15).long()
    label, right = ("gptq_v2", "gptq") if less_one else ("gptq", "gptq_v2")
    tensors = {
        "up.qweight": stream(codes.T.numpy(), 4).T.contiguous(),
        "up.qzeros": stream((zeros - int(less_one)).numpy(), 4),
        "up.scales": torch.full((4, 512), 0.01, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for form in (right, label):
        method = find_method({"quantization_config": Scheme(checkpoint_format=form).config})
        assert method is not None
        if form == right:
            assert StoredMatrices(method, read_headers(tmp_path)).notes == ()
            continue
        with pytest.raises(UnsupportedModelError, match=rf"as {label}, .* steps, and as {right} one of 0\.\d\d; set"):
            StoredMatrices(method, read_headers(tmp_path))


def test_zeros_of_zero_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each integer of a word at once, and adds it again."""
    weights = save_quantized(tmp_path, Scheme(checkpoint_format="gptq_v2"), {"up": (16, 32)})
    change(tmp_path, lambda tensors: tensors["up.qzeros"][0, 0].bitwise_and_(~0xF0))
    expected = opened(tmp_path).load("up.weight")
    assert not torch.equal(expected.double(), weights["up.weight"])
    less = {"up.qzeros": (load_file(tmp_path / "model.safetensors")["up.qzeros"].long() - 0x11111111).to(torch.int32)}
    change(tmp_path, lambda tensors: tensors.update(less))
    method = find_method({"quantization_config": Scheme().config})
    assert method is not None
    assert torch.equal(StoredMatrices(method, read_headers(tmp_path)).load("up.weight"), expected)


def test_the_indices_in_the_file_decide(tmp_path: Path) -> None:
    """Neither desc_act nor its lack says more than `g_idx`; one of zeros was never filled."""
    scheme = Scheme(desc_act=True)
    config = {**scheme.config, "desc_act": False}
    weights = save_made(tmp_path, scheme.make, config, {"up": (32, 96)})
    assert torch.equal(opened(tmp_path).load("up.weight").double(), weights["up.weight"])
    in_order = save_quantized(tmp_path, Scheme(), {"up": (32, 96)})
    change(tmp_path, lambda tensors: tensors["up.g_idx"].zero_())
    assert torch.equal(opened(tmp_path).load("up.weight").double(), in_order["up.weight"])


@pytest.mark.parametrize("key", ["dynamic", "extra_config"])
def test_bits_and_groups_of_single_modules(tmp_path: Path, key: str) -> None:
    """Shapes tell which of a config's settings a matrix has."""
    form = "gptq" if key == "dynamic" else "auto_round:auto_gptq"
    schemes = [
        Scheme("gptq" if key == "dynamic" else "auto-round", bits, size, checkpoint_format=form)
        for bits, size in ((4, 32), (8, 32), (4, 64), (2, 16))
    ]
    overrides = {"a": {"bits": 8}, "b": {"group_size": 64}, "c": {"bits": 2, "group_size": 16}, "-:d": {}}
    if key == "extra_config":
        overrides["-:d"] = {"bits": 16}
    shapes = dict.fromkeys(("own", "a", "b", "c"), (32, 192))
    config = {**schemes[0].config, key: overrides}
    weights = save_made(tmp_path, lambda o, i, s: quantized_matrix(schemes[s], o, i, s), config, shapes)
    found = opened(tmp_path)
    assert all(torch.equal(found.load(name).double(), weight) for name, weight in weights.items())


def test_zero_biases_are_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    save_quantized(tmp_path, Scheme(), {"up": (16, 32), "down": (32, 32), "gate": (16, 32)})
    biases = {"up.bias": torch.zeros(16), "gate.bias": torch.zeros(16), "down.bias": torch.ones(32)}
    change(tmp_path, lambda tensors: tensors.update(biases))
    headers = opened(tmp_path).without_zero_biases({"gate.bias"})
    assert {name for name in headers if name.endswith("bias")} == {"gate.bias", "down.bias"}


def test_configs_in_files_of_their_own(tmp_path: Path) -> None:
    """AutoGPTQ's and AutoAWQ's early checkpoints have it beside config.json, and others in the config of their text."""
    for name, scheme, keys in (
        ("quantize_config.json", Scheme(), {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        ("quant_config.json", Scheme("awq"), {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        weights = save_made(folder, scheme.make, {}, SHAPES)
        assert find_method(read_config(folder)) is None
        (folder / name).write_text(str(keys).replace("'", '"').replace("True", "true").replace("False", "false"))
        found = opened(folder)
        assert all(torch.equal(found.load(parameter).double(), weight) for parameter, weight in weights.items())
    text = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert read_config(tmp_path)["quantization_config"] == text["quantization_config"]
    (tmp_path / "config.json").write_text("{}")
    theirs = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(theirs))
    assert read_config(tmp_path)["quantization_config"] == {"quant_method": "modelopt", **theirs["quantization"]}


def _without(part: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"up.{part}")


def _as(part: str, changed: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"up.{part}": changed(tensors[f"up.{part}"])})


@pytest.mark.parametrize(
    ("change_it", "says"),
    [
        (_without("scales"), "holds up.qweight, but no up.scales"),
        (_without("qzeros"), "holds up.qweight, but no up.qzeros"),
        (_as("qweight", lambda t: t.long()), "up.qweight is I64; I32 is read"),
        (_as("qzeros", lambda t: t.long()), "up.qzeros is I64; I32 is read"),
        (_as("qweight", lambda t: t[:-1]), "up.g_idx is [96], but integers [11, 16] of 4 bits in groups of 32"),
        (_as("qzeros", lambda t: t[:, :-1]), "up.qzeros is [3, 1], but integers [12, 16]"),
        (_as("scales", lambda t: t[:-1]), "up.scales is [2, 16]"),
        (_as("scales", lambda t: t.int()), "up.scales is I32"),
        (_as("scales", lambda t: t[0]), "up.scales is F16 [16]"),
        (_as("scales", lambda t: t / 0), "up.scales has NaN or infinite values"),
        (_as("g_idx", lambda t: t + 1), "up.g_idx names groups that there are not"),
        (_as("g_idx", lambda t: t - 1), "up.g_idx names groups that there are not"),
        (_as("g_idx", lambda t: t.clamp(min=1)), "up.g_idx has 64 inputs in a group, and quantization_config 32"),
        (_as("g_idx", lambda t: t.half()), "up.g_idx is F16; I32 is read"),
        (lambda tensors: tensors.update({"up.weight": torch.ones(16, 96)}), "two weights"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, change_it: Callable[[dict[str, Tensor]], object], says: str) -> None:
    save_quantized(tmp_path, Scheme(), {"up": (16, 96)})
    change(tmp_path, change_it)
    with pytest.raises(UnsupportedModelError) as caught:
        opened(tmp_path).load("up.weight")
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("bits", "labelled"), [(8, 4), (4, 8), (4, 2), (3, 4)])
def test_bits_that_shapes_deny_are_refused(tmp_path: Path, bits: int, labelled: int) -> None:
    scheme = Scheme(bits=bits)
    save_made(tmp_path, scheme.make, {**scheme.config, "bits": labelled}, {"up": (32, 96)})
    with pytest.raises(UnsupportedModelError, match=rf"of {labelled} bits in groups of 32, as quantization_config has"):
        opened(tmp_path)


def test_tensors_and_files_that_are_not_there(tmp_path: Path) -> None:
    save_quantized(tmp_path, Scheme(desc_act=True), {"up": (16, 96)})
    tensors = opened(tmp_path)
    for name in ("norm.weight", "up.qweight", "nothing"):
        with pytest.raises(KeyError):
            tensors.load(name)
    change(tmp_path, lambda tensors: tensors.pop("up.g_idx"))
    with pytest.raises(UnsupportedModelError, match=r"no up\.g_idx, which desc_act in quantization_config asks for"):
        opened(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"cannot read up\.qweight"):
        tensors.load("up.weight")
