"""What a text for MODEL means: a path, or a name on the hub."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picompile.errors import UsageError
from picompile.hub import ModelName, parse_model

NAMES = {
    "Qwen/Qwen3-0.6B": ModelName("Qwen/Qwen3-0.6B"),
    "unsloth/Qwen3-0.6B-GGUF:Q4_K_M": ModelName("unsloth/Qwen3-0.6B-GGUF", choice="Q4_K_M"),
    "a/b@v1.1": ModelName("a/b", "v1.1"),
    "a/b@refs/pr/3:q8_0": ModelName("a/b", "refs/pr/3", "Q8_0"),
    "hf://a/b": ModelName("a/b"),
    "HF://a/b:IQ4_XS": ModelName("a/b", choice="IQ4_XS"),
    "hf.co/a/b:Q8_0": ModelName("a/b", choice="Q8_0"),
    "huggingface.co/a/b": ModelName("a/b"),
    "https://huggingface.co/a/b/": ModelName("a/b"),
    "https://huggingface.co/a/b/tree/v2": ModelName("a/b", "v2"),
    "https://huggingface.co/a/b/blob/main/deep/b-Q4_0.gguf": ModelName("a/b", choice="deep/b-Q4_0.gguf"),
    "https://huggingface.co/a/b/resolve/main/b.gguf?download=true": ModelName("a/b", choice="b.gguf"),
    "hf://a/b@v1/b-Q4_0.gguf": ModelName("a/b", "v1", "b-Q4_0.gguf"),
}


@pytest.mark.parametrize("text", NAMES)
def test_names(text: str) -> None:
    assert parse_model(text) == NAMES[text]


@pytest.mark.parametrize("text", ["tiny", "./a/b", "/a/b", "a/b/c", "../a", "a/b:", "a b/c", "~/a", "a/b.gguf/c"])
def test_paths(text: str) -> None:
    assert parse_model(text) == Path(text)


def test_what_is_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is in a folder that is here is a path, even if it is mistyped."""
    monkeypatch.chdir(tmp_path)
    assert parse_model("models/tiny") == ModelName("models/tiny")
    (tmp_path / "models").mkdir()
    assert parse_model("models/tiny") == Path("models/tiny")
    assert parse_model("hf://models/tiny") == ModelName("models/tiny")


@pytest.mark.parametrize("text", ["hf://", "hf://a", "hf://a/b/c", "https://huggingface.co/a/b/blob/main/c.txt"])
def test_what_begins_as_a_name_must_be_one(text: str) -> None:
    with pytest.raises(UsageError, match="no name of a model"):
        parse_model(text)


WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,8}", fullmatch=True)


@given(
    st.builds(lambda a, b, *rest: ModelName(f"{a}/{b}", *rest), WORDS, WORDS, WORDS, st.none() | WORDS.map(str.upper))
)
def test_a_name_means_what_it_writes(name: ModelName) -> None:
    assert parse_model(f"hf://{str(name).removeprefix('hf://')}") == name
