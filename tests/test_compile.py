"""The driver: the same inputs give the same bytes, and a failure leaves nothing behind."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import picompile_runtime
from picompile.artifact.files import check_disk
from picompile.compile import compile_model
from picompile.compile.lower import warn_if_large
from picompile.compile.passes import pipeline_passes
from picompile.config import CompileOptions
from picompile.errors import DoesNotFitError, TargetError, UnsupportedModelError, UsageError
from picompile.frontend.module import capture_module
from picompile.progress import NoProgress
from picompile.quantities import parse_accuracy_bound, parse_checked_bound, parse_share
from picompile_codegen.lowering import program as codegen_program


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow("compiles a model three times")
def test_what_is_there_stays_until_it_is_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact is replaced only when asked, and by a whole one; a folder of something else never."""
    output, options = tmp_path / "artifact", {"quant": "f16", "context": 32}
    compile_model(tiny_model, output, CompileOptions(**options))
    before = _files(output)
    with pytest.raises(UsageError, match="--overwrite"):
        compile_model(tiny_model, output, CompileOptions(**options))

    def fail(*_: object) -> Tensor:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr("picompile.artifact.writer.evaluate_constant", fail)
        compile_model(tiny_model, output, CompileOptions(**options, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    assert _files(output) == before
    compile_model(tiny_model, output, CompileOptions(quant="f16", context=40, overwrite=True))
    assert json.loads((output / "program.json").read_text())["context"] == 40
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UsageError, match="no artifact"):
        compile_model(tiny_model, tmp_path / "thesis", CompileOptions(overwrite=True))
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@pytest.mark.slow("compiles a model twice")
def test_the_same_inputs_give_the_same_bytes(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICOMPILE_CACHE", "off")
    for name in ("first", "second"):
        compile_model(tiny_model, tmp_path / name, CompileOptions(quant="q4", context=64))
    first, second = _files(tmp_path / "first"), _files(tmp_path / "second")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": "4090,2080ti"}, TargetError, "one GPU"),
        ({"accelerator": "tpu"}, UsageError, "unknown accelerator 'tpu'"),
        ({"predictor": "psychic"}, UsageError, "psychic"),
        ({"kv_dtype": "f8"}, UsageError, "f8"),
        ({"bf16": "yes"}, UsageError, "unknown bf16 'yes'; known are auto, on, off"),
        ({"context": 0}, UsageError, "at least 1"),
        ({"chunk": 1}, UsageError, "at least 2"),
        ({"draft_tokens": 256}, UsageError, "draft tokens must be at least 0 and at most 255, not 256"),
        ({"kv_dtype": "q4", "target": "4090"}, UsageError, "a KV cache in q4 has no kernels for cuda; choose q8"),
        ({"sequences": 257}, UsageError, "sequences must be at least 1 and at most 256, not 257"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CompileOptions(**options)  # type: ignore[arg-type]


def test_options_that_do_not_fit_the_model_leave_nothing(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "artifact"
    with pytest.raises(UsageError, match="257 tokens is more than the model's 256"):
        compile_model(tiny_model, output, CompileOptions(context=257))
    with pytest.raises(UsageError, match="heads whose width is a multiple of 32, and this model's is 24; choose q8"):
        compile_model(tiny_model, output, CompileOptions(kv_dtype="q4"))
    with pytest.raises(UsageError, match="a module in memory computes its own"):
        compile_model(capture_module(_Decoder().eval()), output, CompileOptions(activation="relu"))
    with pytest.raises(DoesNotFitError, match="GiB free"):
        check_disk(output, 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("total_bytes", "said"), [(2**20, False), (2**20 - 1, True)])
def test_a_cache_larger_than_this_machine_is_told(
    total_bytes: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not refused: the artifact may be for another machine."""
    lines: list[str] = []

    class Listening(NoProgress):
        def say(self, text: str) -> None:
            lines.append(text)

    monkeypatch.setattr("picompile.compile.lower.host_memory", lambda: (total_bytes, 0))
    sizes = codegen_program.LoweredProgram(context=128, chunk=4, vocab=5, layers=1, sequences=8)
    sizes.state = {side: codegen_program.ProgramTensor("float16", (8, 2, 128, 128)) for side in "kv"}
    warn_if_large(sizes, Listening())
    assert [line.split(" takes ")[0] for line in lines] == ["a cache for 8 sequences of 128 tokens"] * said


def test_the_tokenizer_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["extra"] = 300
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModelError, match="belongs to another model"):
        compile_model(model, tmp_path / "artifact", CompileOptions(context=32))
    assert not (tmp_path / "artifact").exists()


class _Decoder(nn.Module):
    """A decoder that nobody told picompile about."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 48)
        self.norm = nn.LayerNorm(48)
        self.qkv = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.out = nn.Linear(48, 48)
        self.second_norm = nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 120), nn.Linear(120, 48)
        self.head = nn.Linear(48, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, count, _ = x.shape
        q, k, v = (part(self.norm(x)).view(batch, count, 4, 12).transpose(1, 2) for part in self.qkv)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, count, 48))
        x = x + self.down(torch.relu(self.up(self.second_norm(x))))
        return self.head(x)


@pytest.mark.slow("compiles a model")
def test_any_module_compiles_and_gives_its_own_logits(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = _Decoder().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())
    compile_model(capture_module(module), tmp_path / "artifact", CompileOptions(quant="f16", context=40))
    ids = torch.randint(61, (30,)).tolist()
    with torch.no_grad():
        expected = module(torch.tensor([ids]))[0]
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        scored = torch.cat([torch.from_numpy(rows) for rows in engine.score(ids)])
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def _order(*passes: str) -> list[str]:
    return [pass_.name for pass_ in pipeline_passes(CompileOptions(passes=passes))]


def test_a_pass_runs_where_the_graph_reaches_its_stage() -> None:
    own = _order()
    assert own[-5:] == ["flatten-tokens", "stamp-layers", "insert-predictors", "partition", "quantize"]
    # Twice the same: what requires captured comes first, what requires predicted behind the predictors.
    assert _order("partition{hot=(0:(1,))}", "remove-copies") == ["remove-copies", *own[:-2], "partition", *own[-2:]]
    assert _order("remove-copies@canonical")[-4:] == ["remove-copies", *own[-3:]]
    assert _order("quantize{format=q8}@partitioned")[-3:] == ["partition", "quantize", "quantize"]
    # A stage before the one it requires changes nothing.
    assert _order("partition@captured") == _order("partition")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition@early", "'early' is no stage; the stages are captured, canonical"),
        ("no-such-pass", "there is no pass no-such-pass"),
        ("no-such-pass@quantized", "there is no pass no-such-pass"),
        ("quantize{format=a@b}", "'a@b' is not one of"),
    ],
)
def test_a_pass_that_cannot_be_had_is_told_before_the_model_is_read(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message) as error:
        compile_model(tmp_path / "no model", tmp_path / "artifact", CompileOptions(passes=(text,)))
    assert error.value.exit_code == 2  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_shares_are_parsed() -> None:
    texts = {"0.1%": 0.001, "0.001": 0.001, " 6 %": 0.06, "100%": 1, "0": 0, "1e-3": 0.001}
    assert {text: parse_share(text, "--budget") for text in texts} == pytest.approx(texts)
    for text in ("", "%", "many", "-1%", "101%", "nan", "inf", "0.1%%"):
        with pytest.raises(UsageError, match="--budget"):
            parse_share(text, "--budget")


def test_the_accuracy_check_can_be_off() -> None:
    assert parse_accuracy_bound("Off ", "") is parse_checked_bound("off", "") is None
    assert parse_checked_bound("Report", "") == math.inf
    assert parse_accuracy_bound("0.5%", "") == parse_checked_bound("0.5%", "") == pytest.approx(0.005)
    with pytest.raises(UsageError, match="--accuracy-bound"):
        parse_checked_bound("reports", "--accuracy-bound")
