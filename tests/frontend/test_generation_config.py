"""A checkpoint's generation_config.json, read before compiling."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from picompile.errors import UnsupportedModelError
from picompile.frontend.generation_config import check_generation_config, read_generation_config
from picompile_runtime.sampling.model_defaults import unread_fields


def test_values_that_make_no_sense_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 0}')
    with pytest.raises(
        UnsupportedModelError, match=r"^[^\n]*generation_config\.json: repetition_penalty [^\n]*, not 0; "
    ):
        check_generation_config(tmp_path)


def test_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    assert check_generation_config(tmp_path) is None
    GenerationConfig(do_sample=True, top_k=20, temperature=0.6, max_new_tokens=64).save_pretrained(tmp_path)
    assert check_generation_config(tmp_path) is None
    GenerationConfig(no_repeat_ngram_size=2, suppress_tokens=[1]).save_pretrained(tmp_path)
    assert check_generation_config(tmp_path) == (
        "generation_config.json: no_repeat_ngram_size, suppress_tokens would change which tokens come, "
        "and picompile does not read them"
    )


def test_what_transformers_has_by_default_changes_nothing(tmp_path: Path) -> None:
    """Older versions write every field, with its default."""
    written = json.loads(GenerationConfig().to_json_string(use_diff=False))
    assert unread_fields({**written, **GenerationConfig._get_default_generation_params()}) == []


def test_without_the_file_fields_of_config_json_count(tmp_path: Path) -> None:
    """transformers makes the file of them, and takes the text's where the model itself says nothing."""
    text = {"repetition_penalty": 1.5, "temperature": 0.25, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.5, "text_config": text}))
    path, found = read_generation_config(tmp_path)
    assert (path.name, found) == ("config.json", {"do_sample": False, "temperature": 0.5, "repetition_penalty": 1.5})
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert read_generation_config(tmp_path)[1] == {"top_k": 3}
