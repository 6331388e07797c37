"""Which files of a repository are downloaded."""

import pytest

from picompile.errors import DoesNotFitError, UnsupportedModelError, UsageError
from picompile.hub.listing import RepoFile, choose_files, gguf_models
from picompile.hub.names import ModelName

GB = 10**9
CHECKPOINT = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BESIDE = ["generation_config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"]
OTHERS = ["consolidated.safetensors", "README.md", "onnx/model.onnx", "original/x.safetensors", "pytorch_model.bin"]


def files(*names: str, size: int = GB) -> list[RepoFile]:
    return [RepoFile(name, size) for name in names]


def chosen(name: str, found: list[RepoFile], memory: int = 64 * GB) -> list[str]:
    repo, _, choice = name.partition(":")
    return [file.path for file in choose_files(ModelName(repo, choice=choice or None), found, memory).files]


def test_a_checkpoint_is_its_weights_and_what_stands_beside_them() -> None:
    assert sorted(chosen("a/b", files(*CHECKPOINT, *BESIDE, *OTHERS))) == sorted(CHECKPOINT + BESIDE)


def test_a_checkpoint_comes_before_gguf_files_unless_one_is_named() -> None:
    found = files(*CHECKPOINT, "b-Q4_K_M.gguf")
    assert "config.json" in chosen("a/b", found)
    assert chosen("a/b:Q4_K_M", found) == ["b-Q4_K_M.gguf"]


def test_a_format_names_a_file() -> None:
    found = files(
        "b-Q4_K_M.gguf", "b-UD-Q4_K_XL.gguf", "b.Q8_0.gguf", "b-bf16.gguf", "mmproj-F16.gguf", "b-MXFP4_MOE.gguf"
    )
    for choice, file in {
        "q4_k_m": "b-Q4_K_M.gguf",
        "UD-Q4_K_XL": "b-UD-Q4_K_XL.gguf",
        "Q8_0": "b.Q8_0.gguf",
        "BF16": "b-bf16.gguf",
        "mxfp4_moe": "b-MXFP4_MOE.gguf",
        "b-Q4_K_M.gguf": "b-Q4_K_M.gguf",
    }.items():
        assert chosen(f"a/b:{choice}", found) == [file]
    with pytest.raises(UsageError, match=r"no GGUF model Q2_K; it has BF16, MXFP4_MOE, Q4_K_M, Q8_0, UD-Q4_K_XL"):
        chosen("a/b:Q2_K", found)


def test_several_files_of_one_format_are_told_apart() -> None:
    found = files("one-Q8_0.gguf", "two-Q8_0.gguf")
    with pytest.raises(UsageError, match=r"name one of hf://a/b/one-Q8_0\.gguf, hf://a/b/two-Q8_0\.gguf"):
        chosen("a/b:Q8_0", found)
    assert chosen("a/b:two-Q8_0.gguf", found) == ["two-Q8_0.gguf"]


def test_parts_belong_together() -> None:
    parts = [f"Q4_K_M/b-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert chosen("a/b:Q4_K_M", files(*reversed(parts), "b-Q8_0.gguf")) == parts
    assert [model.label for model in gguf_models(files(*parts[:2], "b-Q8_0.gguf"))] == ["Q8_0"]


@pytest.mark.parametrize(
    ("memory", "expected"), [(64, "b-Q4_K_M.gguf"), (12, "b-Q3_K_S.gguf"), (7, "b-IQ2_XS.gguf"), (14, "b-Q4_K_M.gguf")]
)
def test_the_best_that_fits(memory: int, expected: str) -> None:
    sizes = {"b-F16.gguf": 32, "b-Q8_0.gguf": 16, "b-Q4_K_M.gguf": 11, "b-Q3_K_S.gguf": 9, "b-IQ2_XS.gguf": 5}
    found = [RepoFile(name, size * GB) for name, size in sizes.items()]
    assert chosen("a/b", found, memory * GB) == [expected]


def test_without_q4_k_m_the_largest_quantized_one_that_fits() -> None:
    found = [RepoFile("b-F16.gguf", 4 * GB), RepoFile("b-Q8_0.gguf", 2 * GB), RepoFile("b-Q4_0.gguf", GB)]
    assert chosen("a/b", found) == ["b-Q8_0.gguf"]
    assert chosen("a/b", found[:1]) == ["b-F16.gguf"]


def test_none_fits() -> None:
    found = files("b-Q4_K_M.gguf", "b-Q8_0.gguf", size=40 * GB)
    with pytest.raises(DoesNotFitError, match=r"its smallest model, Q4_K_M, needs about 38.* GiB"):
        chosen("a/b", found, 16 * GB)
    assert chosen("a/b:Q8_0", found, 16 * GB) == ["b-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (["README.md"], "no safetensors checkpoint and no GGUF model"),
        (["config.json", "pytorch_model.bin"], "it has .bin files, which are not read"),
        (["model.safetensors"], "no safetensors checkpoint"),
        (["mmproj-F16.gguf"], "no GGUF model"),
    ],
)
def test_no_model(found: list[str], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        chosen("a/b", files(*found))


def test_a_format_of_a_repository_without_gguf_files() -> None:
    with pytest.raises(UsageError, match="write a/b for its safetensors checkpoint"):
        chosen("a/b:Q4_K_M", files(*CHECKPOINT))
