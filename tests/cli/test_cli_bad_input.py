"""Bad input: one clear line, the documented exit code, and nothing half-written."""

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.support import Cli, Ended, save_byte_tokenizer
from picompile_runtime.artifact.manifest import sealed

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoiled."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def assert_refused(ended: Ended, code: int, *says: str) -> None:
    assert ended.err.startswith("error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert "internal error" not in ended.err
    for text in says:
        assert text in ended.err
    assert ended.code == code
    assert ended.out == ""


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


# ------------------------------------------------------------------------------------------------------------- models


def truncate_weights(folder: Path) -> None:
    path = weights_of(folder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def truncate_header(folder: Path) -> None:
    with weights_of(folder).open("r+b") as file:
        file.truncate(100)


def empty_weights(folder: Path) -> None:
    weights_of(folder).write_bytes(b"")


def only_bin(folder: Path) -> None:
    weights_of(folder).rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    weights_of(folder).unlink()


def lost_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = weights_of(folder)
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


def wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=208)


def lost_shard(folder: Path) -> None:
    path = weights_of(folder)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": path.name, "lm_head.weight": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    path.rename(folder / "model-1.safetensors")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def config_without_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def larger_tokenizer(folder: Path) -> None:
    save_byte_tokenizer(folder, vocabulary=400)


def other_architecture(folder: Path) -> None:
    change_config(folder, model_type="gpt_bigcode", architectures=["GPTBigCodeForCausalLM"])


def unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="nosuch", architectures=["NoSuchForCausalLM"])


def unsupported_activation(folder: Path) -> None:
    change_config(folder, hidden_act="mish")


def another_type(folder: Path) -> None:
    change_config(folder, model_type="gemma")


def million_layers(folder: Path) -> None:
    change_config(folder, num_hidden_layers=10**6)


def layers_of_no_tensors(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5000)


def no_number(folder: Path) -> None:
    change_config(folder, rms_norm_eps=float("nan"))


def list_for_a_name(folder: Path) -> None:
    change_config(folder, hidden_act=[])


def key_twice(folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(text.removesuffix("}") + ', "hidden_act": "silu"}')


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)


def norm_of_nan(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights_of(folder))
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, weights_of(folder))


def unknown_activation(folder: Path) -> None:
    change_config(folder, hidden_act="nosuch")


SPOILED: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (truncate_weights, ("model.safetensors",)),
    (truncate_header, ("model.safetensors",)),
    (empty_weights, ("model.safetensors",)),
    (only_bin, ("safetensors",)),
    (no_weights, ("safetensors",)),
    (lost_tensor, ("up_proj",)),
    (wrong_shape, ("200", "208")),
    (lost_shard, ("safetensors",)),
    (broken_config, ("config.json",)),
    (config_without_type, ("not supported",)),
    (broken_tokenizer, ("tokenizer",)),
    (larger_tokenizer, ("tokenizer", "300")),
    (other_architecture, ("no tensor transformer.wte.weight",)),
    (unknown_architecture, ("NoSuch",)),
    (unsupported_activation, ("mish",)),
    (unknown_activation, ("nosuch",)),
    (another_type, ("LlamaForCausalLM", "gemma")),
    (million_layers, ("num_hidden_layers", "1000000")),
    (layers_of_no_tensors, ("no tensor of layer 2", "5000")),
    (no_number, ("rms_norm_eps", "nan")),
    (list_for_a_name, ("activation",)),
    (key_twice, ("'hidden_act' stands twice",)),
    (deep_config, ("config.json", "recursion")),
    pytest.param(
        norm_of_nan, ("model.norm.weight", "NaN"), marks=pytest.mark.slow("lowers a model before it reads this")
    ),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILED, ids=lambda value: getattr(value, "__name__", ""))
def test_models_that_cannot_be_compiled(
    cli: Cli, model: Path, tmp_path: Path, spoil: Callable[[Path], None], says: tuple[str, ...]
) -> None:
    spoil(model)
    ended = cli("compile", model, "-o", tmp_path / "out" / "artifact")
    assert_refused(ended, 3, *says)
    assert_nothing_left(tmp_path, "model")


@pytest.mark.slow("profiles, trains and compiles a model")
def test_fields_without_effect_are_named_once(cli: Cli, model: Path, tmp_path: Path) -> None:
    """A compilation that profiles and trains reads the checkpoint in each."""
    change_config(model, qk_layernorm=True, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--quant", "f16", "--context", "16")
    assert ended.code == 0
    named = "neither transformers nor picompile knows qk_layernorm; auto_map names code in the checkpoint"
    assert ended.err.count(named) == 1
    assert ended.err.count("\n") == 1
    planned = cli("plan", model, "--firing", "opt", "--target", "cpu")
    assert (planned.code, planned.err.count(named), planned.err.count("\n")) == (0, 1, 1)


@pytest.mark.slow("compiles a model per file", but=("tokenizer.json",))
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("generation_config.json", '{"eos_token_id": "257"}', "must be a token id"),
        ("generation_config.json", '{"eos_token_id": [257.0]}', "must be a token id"),
        ("generation_config.json", "[257]", "not a JSON object"),
        ("tokenizer_config.json", '{"bos_token": "<s>"', "not readable as JSON"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer.json", "[1]", "is no tokenizer"),
    ],
)
def test_files_that_would_keep_an_artifact_from_loading(
    cli: Cli, model: Path, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (model / name).write_text(text)
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact"), 3, name, says)
    assert_nothing_left(tmp_path, "model")


@pytest.mark.slow("compiles a model per file", but=("tokenizer.json",))
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_files_that_are_links_to_nowhere(cli: Cli, model: Path, tmp_path: Path, name: str) -> None:
    """As in a cache whose other half was deleted: the artifact had no tokenizer, and nobody said so."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "nowhere")
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact"), 3, name, "a link to nowhere")
    assert_nothing_left(tmp_path, "model")


def test_exact_predictor_for_an_activation_that_is_never_silent(cli: Cli, model: Path, tmp_path: Path) -> None:
    change_config(model, hidden_act="silu")
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--predictor", "exact")
    assert_refused(ended, 3, "silu", "none")
    assert_nothing_left(tmp_path, "model")


@pytest.mark.parametrize("name", ["missing", "model/config.json", "empty"])
def test_not_a_model_folder(cli: Cli, model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(cli("compile", tmp_path / name, "-o", tmp_path / "artifact"), 2, name)
    assert_nothing_left(tmp_path, "model", "empty")


def test_a_context_beyond_the_models_positions(cli: Cli, model: Path, tmp_path: Path) -> None:
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--context", "257")
    assert_refused(ended, 2, "257", "256")
    assert_nothing_left(tmp_path, "model")


@pytest.mark.parametrize("count", ["0", "257", "many"])
def test_wrong_numbers_of_sequences_are_refused(cli: Cli, model: Path, tmp_path: Path, count: str) -> None:
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact", "--sequences", count), 2, "--sequences")
    assert_nothing_left(tmp_path, "model")


def test_a_cache_that_kernels_cannot_count(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.config._MOST_ELEMENTS", 20_000)
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--context", "32", "--sequences", "16")
    assert_refused(ended, 2, "16 sequences of 32 tokens", "20,000")
    assert_nothing_left(tmp_path, "model")


def test_a_pass_that_does_not_exist(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact", "--pass", "no-such-pass"), 2, "no-such-pass")
    assert_nothing_left(tmp_path, "model")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1, 2", "not JSON"),
        ("[1, 2]", "object"),
        ('{"a": [1]}', "'a'"),
        ('{"0": 5}', "layer 0"),
        ('{"0": [-1]}', "layer 0"),
        ('{"0": [true]}', "layer 0"),
        ('{"0": [5, 5]}', "twice"),
        ('{"0": [200]}', "200"),
        ('{"2": [0]}', "2"),
    ],
)
def test_wrong_hot_files_are_refused(cli: Cli, model: Path, tmp_path: Path, content: str, says: str) -> None:
    hot = tmp_path / "hot.json"
    hot.write_text(content)
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact", "--hot", hot), 2, says)
    assert_nothing_left(tmp_path, "model", "hot.json")


# ------------------------------------------------------------------------------------------------------------- outputs


def test_output_in_a_place_where_nothing_can_be_written(cli: Cli, model: Path, tmp_path: Path) -> None:
    # /proc refuses even root, which these tests may run as.
    assert_refused(cli("compile", model, "-o", "/proc/artifact"), 2, "/proc")
    (tmp_path / "file").write_text("")
    assert_refused(cli("compile", model, "-o", tmp_path / "file" / "artifact"), 2, "file")
    assert_refused(cli("synth", "--shape", "tiny-reglu", "-o", "/proc/model"), 2, "/proc")
    assert_nothing_left(tmp_path, "model", "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_in_a_folder_without_permission(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert_refused(cli("compile", model, "-o", tmp_path / "locked" / "artifact"), 2, "locked")


def test_output_that_is_in_the_way(cli: Cli, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "diary.txt").write_text("dear diary")
    for force in ([], ["--force"]):
        assert_refused(cli("compile", model, "-o", output, *force), 2, "out", "choose another")
    assert_refused(cli("synth", "--shape", "tiny-reglu", "-o", output), 2, "out", "choose another")
    assert (output / "diary.txt").read_text() == "dear diary"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_refused(cli("compile", model, "-o", tmp_path / "link", "--force"), 2, "link")
    assert_nothing_left(tmp_path, "model", "out", "link")


def test_an_artifact_in_the_way_needs_force(cli: Cli, model: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    before = (output / "manifest.json").read_bytes()
    assert_refused(cli("compile", model, "-o", output), 2, "--force")
    assert (output / "manifest.json").read_bytes() == before


def test_a_disk_that_is_too_small(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000, 9_000, 1_000))
    assert_refused(cli("compile", model, "-o", tmp_path / "out" / "artifact"), 5, "0.0 MiB are free")
    assert_refused(cli("synth", "--shape", "tiny-reglu", "-o", tmp_path / "out" / "model"), 5, "disk")
    assert_nothing_left(tmp_path, "model")


def test_a_disk_too_small_for_the_compiled_artifact(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the packed weights, which the command line estimates; too little for the whole artifact.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 0, 1_000_000))
    assert_refused(cli("compile", model, "-o", tmp_path / "out" / "artifact"), 5)
    assert_nothing_left(tmp_path, "model")


@pytest.mark.slow("compiles a model per failure", but=("disk full",))
@pytest.mark.parametrize(
    ("failure", "code"),
    [(OSError(errno.ENOSPC, "No space left on device"), 5), (KeyboardInterrupt(), 130), (MemoryError(), 5)],
    ids=["disk full", "ctrl-c", "out of memory"],
)
def test_failures_while_writing_leave_nothing(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int
) -> None:
    import picompile.artifact.files
    import picompile_codegen.build.host_library

    def fail(path: Path, *rest: object) -> str:
        path.write_bytes(b"half of it")
        raise failure

    # Kernels take seconds to compile and have no part in this.
    monkeypatch.setattr(
        picompile_codegen.build.host_library, "build_host_library", lambda kernels, path, isa: path.touch()
    )
    monkeypatch.setattr(picompile.artifact.files, "write_weights", fail)
    ended = cli("compile", model, "-o", tmp_path / "out" / "artifact")
    assert ended.code == code
    assert ended.err.count("\n") == (0 if code == 130 else 1)
    assert_nothing_left(tmp_path, "model")


# ----------------------------------------------------------------------------------------------------------- artifacts


def test_a_prompt_longer_than_the_context(cli: Cli, tiny_artifact: Path) -> None:
    assert_refused(cli("run", tiny_artifact, "-p", "x" * 64), 2, "65", "64")
    assert_refused(cli("run", tiny_artifact, "--ids", ",".join(["1"] * 65)), 2, "65", "64")


@pytest.mark.parametrize("digits", [19, 5000])
def test_numbers_of_many_digits(
    digits: int, cli: Cli, tiny_model: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reads none of more than 4,300."""
    number = "9" * digits
    assert_refused(cli("run", tiny_artifact, "--ids", f"1,{number}"), 2, "--ids takes numbers")
    for content in (f'{{"0": [{number}]}}', f'{{"{number}": [1]}}'):
        (tmp_path / "hot.json").write_text(content)
        assert_refused(cli("compile", tiny_model, "-o", tmp_path / "out", "--hot", tmp_path / "hot.json"), 2)
    monkeypatch.setenv("PICOMPILE_THREADS", number)
    assert_refused(cli("run", tiny_artifact, "--ids", "1"), 2, "PICOMPILE_THREADS must be a number from 1 to 256")


def test_a_context_past_the_models_positions_is_refused_before_anything_is_compiled(
    cli: Cli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.compile.compile_model", None)
    ended = cli("compile", tiny_model, "-o", tmp_path / "out", "--context", 257)
    assert_refused(ended, 2, "257 tokens is more than the model's 256")
    assert not list(tmp_path.iterdir())


def test_token_ids_beyond_the_vocabulary(cli: Cli, tiny_artifact: Path) -> None:
    assert_refused(cli("run", tiny_artifact, "--ids", "1,300"), 2, "299")


def test_lengths_beyond_the_context(cli: Cli, tiny_artifact: Path) -> None:
    assert_refused(cli("bench", tiny_artifact, "-p", "64"), 2, "64")
    assert_refused(cli("bench", tiny_artifact, "-p", "60", "-n", "5"), 2, "64")
    assert_refused(cli("bench", tiny_artifact, "-p", "8", "-n", "5", "-d", "60"), 2, "64", "60")
    assert_refused(cli("bench", tiny_artifact, "-d", "64"), 2, "64")


def test_a_text_too_short_to_measure(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert_refused(cli("eval", tiny_artifact, "--text", tmp_path / "empty.txt"), 2, "2 tokens")


def test_comparing_with_another_model(cli: Cli, tiny_artifact: Path, model: Path, tmp_path: Path) -> None:
    from helpers.support import save_tiny_llama

    other = tmp_path / "other"
    save_tiny_llama(other, vocab_size=310)
    (tmp_path / "text").write_text("hello")
    ended = cli("eval", tiny_artifact, "--text", tmp_path / "text", "--against", other)
    assert_refused(ended, 2, "310", "300")
    assert_refused(cli("eval", tiny_artifact, "--text", tmp_path / "text", "--against", tmp_path / "no"), 2, "no")


READING = [["run", "-p", "x"], ["inspect"], ["verify"], ["bench"]]


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_folders_that_are_no_artifact(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        assert_refused(cli(command[0], tmp_path / name, *command[1:]), 4, name)


def flip_byte(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["verify"]], ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["kernels/host.so", "weights.safetensors", "program.json", "tokenizer.json"])
def test_a_changed_byte_is_found(cli: Cli, tiny_artifact: Path, tmp_path: Path, command: list[str], name: str) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    flip_byte(artifact / name, (artifact / name).stat().st_size // 2)
    assert_refused(cli(command[0], artifact, *command[1:]), 4, name)


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["weights.safetensors", "program.json"])
def test_lost_files_are_missed(cli: Cli, tiny_artifact: Path, tmp_path: Path, command: list[str], name: str) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    (artifact / name).unlink()
    assert_refused(cli(command[0], artifact, *command[1:]), 4, name)


def test_another_machine(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    manifest = json.loads((artifact / "manifest.json").read_text())
    for variant in manifest["code"]:
        variant["features"].append("nosuchfeature")
    (artifact / "manifest.json").write_bytes(sealed(manifest))
    assert_refused(cli("run", artifact, "-p", "x"), 6, "nosuchfeature")
    assert cli("inspect", artifact).code == 0
    assert cli("verify", artifact).code == 0
