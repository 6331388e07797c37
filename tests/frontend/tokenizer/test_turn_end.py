"""The token with which a chat template ends an answer."""

from pathlib import Path
from typing import Any

import pytest

from helpers.tokenizer_folders import CHATML, ROWS, in_artifact, save_folder, train_byte_level
from picompile.frontend.tokenizer.read import read_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|return|>", "<|call|>", "</s>")
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
HARMONY = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def trained() -> Any:
    return train_byte_level(special=SPECIAL)


@pytest.mark.slow("starts a renderer per template", but=("chatml", "glm", "gpt-oss"))
@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }} </s><|im_start|>{% endfor %}", ["</s>"]),
        (GLM, ["<|user|>"]),
        (HARMONY, ["<|return|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}", []),  # see `goes_on`
        ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}", []),
        ("{{ raise_exception('no') }}", []),
        ("{% for m in messages %}<|im_end|>{% endfor %}", []),
    ],
    ids=["chatml", "llama-2", "glm", "gpt-oss", "between parts", "text", "fails", "no answer"],
)
def test_what_a_template_writes_behind_an_answer(tmp_path: Path, trained: Any, template: str, ends: list[str]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config)
    assert read_tokenizer(folder, ROWS).eos_token_ids == tuple(SPECIAL.index(name) for name in ends)


def test_all_files_that_name_an_end(tmp_path: Path, trained: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": CHATML}
    more: dict[str, Any] = {"generation_config__json": {"eos_token_id": 0, "top_k": 5}}
    folder = save_folder(tmp_path, trained, tokenizer_config__json=config, **more)
    assert read_tokenizer(folder, ROWS).generation_config == {"top_k": 5, "eos_token_id": [0, 7, 2]}


def test_a_token_that_is_added_as_an_ordinary_one(tmp_path: Path, trained: Any) -> None:
    """As fine-tuned models have `<|im_end|>` in added_tokens.json."""
    count = trained.get_vocab_size()
    template = CHATML.replace("<|im_end|>", "<|stop|>")
    files: dict[str, Any] = {"added_tokens__json": {"<|stop|>": count}, "tokenizer_config__json": {}}
    folder = save_folder(tmp_path, trained, chat_template__jinja=template, **files)
    assert in_artifact(folder).added_tokens["<|stop|>"] == count
    assert read_tokenizer(folder, ROWS).eos_token_ids == (count,)
