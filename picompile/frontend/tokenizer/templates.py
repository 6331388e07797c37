"""The chat templates of a Hugging Face folder, from all files that may hold them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.json_file import read_json_object, read_text

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# A folder of further templates, each a file NAME.jinja.
MORE_TEMPLATES = "additional_chat_templates"
_MOST_BYTES = 16 << 20


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat_template` as a tokenizer_config.json has it: a text, or a list of named ones; nothing without one.

    As in transformers, chat_template.jinja and additional_chat_templates/*.jinja stand above tokenizer_config.json, and
    chat_template.json, which processors read, below it.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.

    Raises:
        UnsupportedModelError: a template is no text, or there are several and none is for chats without tools.
    """
    found = _of_files(folder) or _of_config(config.get("chat_template"), folder / "tokenizer_config.json")
    old = folder / "chat_template.json"
    if not found and old.is_file():
        found = _of_config(read_json_object(old, _MOST_BYTES).get("chat_template"), old)
    if found.keys() == {"default"}:
        return {"chat_template": found["default"]}
    listed = [{"name": name, "template": text} for name, text in sorted(found.items())]
    return {"chat_template": listed} if listed else {}


def _of_files(folder: Path) -> dict[str, str]:
    files = {"default": folder / TEMPLATE_FILES[0]}
    if (folder / MORE_TEMPLATES).is_dir():
        files |= {file.name.removesuffix(".jinja"): file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: read_text(file, _MOST_BYTES) for name, file in files.items() if file.is_file()}


def _of_config(value: Any, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    named = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(named, Mapping):
        named = [{"name": name, "template": text} for name, text in named.items()]
    if not isinstance(named, list) or not all(_is_named(entry) for entry in named):
        raise UnsupportedModelError(
            f"{file}: chat_template must be a text, or a list of objects with name and template"
        )
    return {entry["name"]: entry["template"] for entry in named if entry["template"]}


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
