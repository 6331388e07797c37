"""The tokenizer of a checkpoint as data: the files that an artifact holds of it, whatever they were read from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer, its chat templates and the tokens that end an answer.

    Folders and GGUF files are read into it, and `write` is the only writer.

    Attributes:
        tokenizer_json: the text of tokenizer.json; None where there is none, so that the model is prompted with ids.
        tokenizer_config: the contents of tokenizer_config.json. `chat_template` is the text of the template, or a list
            of objects with `name` and `template` where there are several, wherever the checkpoint had them.
        generation_config: the contents of generation_config.json. `eos_token_id` lists all tokens that end an answer.
        reason: a line that says why there is no `tokenizer_json`, where the checkpoint has something like it.
        notes: lines that a user should read: parts of the checkpoint that were not taken, and why.
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end an answer."""
        return tuple(self.generation_config.get("eos_token_id", ()))

    def write(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json to `folder`, those that there are."""
        if self.tokenizer_json is not None:
            (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        described = {"tokenizer_config.json": self.tokenizer_config, "generation_config.json": self.generation_config}
        for name, content in described.items():
            if content:
                # With escapes: half of a surrogate pair, which JSON may have, cannot be written otherwise.
                (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
