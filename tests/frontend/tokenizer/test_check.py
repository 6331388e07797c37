"""The check of an artifact's tokenizer against the checkpoint's, and of its templates against transformers."""

from pathlib import Path
from typing import Any

import pytest

from helpers import chat_templates
from helpers.tokenizer_folders import CHATML, ROWS, in_artifact, save_folder, train_byte_level
from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.check import check_ids, check_templates
from picompile.frontend.tokenizer.probes import PROBE_CHATS, probe_texts
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile_runtime.sampling import chat_template
from picompile_runtime.sampling.tokenizer import Tokenizer

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
NAMED = vars(chat_templates).items()
# Names that begin with an underscore are those of parts.
TEMPLATES = {name: text for name, text in NAMED if name[0] != "_" and name.isupper() and isinstance(text, str)}
# What templates may use of transformers' environment.
MORE = {
    "dict": "{{ dict.fromkeys(['a', 'b'], messages|length) | tojson }}{{ dict(a=1) }}",
    "json": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ {'é<': [1.5, none]} | tojson(ensure_ascii=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    "dates": "{{ strftime_now('%Y-%m-%d') }}{{ raise_exception('odd') if messages|length > 1 }}",
    "variables": "{{ documents is none }}{{ tools is none }}{{ bos_token }}{{ eos_token }}{{ image_token is defined }}",
    "whitespace": "  {% for m in messages %}\n  {% if true %}\n  x\n  {% endif %}\n  {% endfor %}\n{#- no -#}  \n",
}
SILENT = {"dict", "namespace", "dates", "variables", "whitespace"}


@pytest.mark.slow("starts a renderer per template", but=("HERMES", "dict"))
@pytest.mark.parametrize("name", [*TEMPLATES, *MORE])
def test_templates_are_rendered_as_by_transformers(name: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(train_byte_level().to_str(), special, {**TEMPLATES, **MORE}[name])
    notes = list(check_templates(tokenizer, special, "model"))
    silent = ["model: the chat template writes no text of the user's messages, neither as texts nor in parts"]
    assert notes == (silent if name in SILENT else [])


def test_a_template_that_is_rendered_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(train_byte_level().to_str(), {}, CHATML)
    monkeypatch.setattr(chat_template, "_message", lambda message: {**message, "content": "x"})
    with pytest.raises(UnsupportedModelError, match="than by transformers, of one question"):
        list(check_templates(tokenizer, {}, "model"))


@pytest.mark.slow("waits until a template has taken its time")
def test_an_endless_template_is_named_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMITS", {**chat_template.LIMITS, "cpu_s": 1})
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = save_folder(tmp_path, train_byte_level(), tokenizer_config__json={**CONFIG, "chat_template": template})
    (note,) = read_tokenizer(folder, ROWS).notes
    assert "the chat template cannot be used: " in note and "takes more than 1 s" in note


def test_a_template_of_errors_is_named(tmp_path: Path) -> None:
    config = {**CONFIG, "chat_template": "{% for m in messages %}"}
    (note,) = read_tokenizer(save_folder(tmp_path, train_byte_level(), tokenizer_config__json=config), ROWS).notes
    assert "the chat template fails on every chat: " in note and "Unexpected end of template" in note


def test_other_ids_and_texts_are_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, train_byte_level(), tokenizer_config__json=CONFIG)
    ours, other = in_artifact(folder), train_byte_level()
    assert list(check_ids(ours, other, "model")) == []
    other.normalizer = _lowercase()
    with pytest.raises(UnsupportedModelError, match="the artifact's tokenizer reads 'Hello world' as "):
        list(check_ids(ours, other, "model"))


def test_an_added_token_that_is_not_read_as_itself() -> None:
    tokenizer = train_byte_level()
    ours = Tokenizer(tokenizer.to_str())
    assert list(check_ids(ours, tokenizer, "model")) == []
    vars(ours)["added_tokens"] = {"<do>": 5}
    (note,) = check_ids(ours, tokenizer, "model")
    assert note.startswith("model: the added token '<do>' is read as [") and note.endswith("], not as 5")


def test_probes_are_the_same_in_every_run() -> None:
    first, second = (probe_texts(train_byte_level()) for _ in range(2))
    assert first == second and len(first) > 300
    assert len({str(chat) for chat in PROBE_CHATS}) == len(PROBE_CHATS)


def _lowercase() -> Any:
    from tokenizers import normalizers

    return normalizers.Lowercase()
