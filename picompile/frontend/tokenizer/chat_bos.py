"""The bos token before chats of a GGUF file, whose chat template may leave it to llama.cpp."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from picompile.frontend.messages import shown_text
from picompile.frontend.tokenizer.probes import PROBE_CHATS
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.chat_template import ChatTemplate, named_templates
from picompile_runtime.sampling.tokenizer import Tokenizer

# The line break belongs to the comment: the template's own text begins at the beginning of a line, as before.
_BOS = "{{ bos_token }}{# llama.cpp puts it before chats, since the file puts it before texts #}\n"


def with_chat_bos(files: TokenizerFiles, tokenizer: Tokenizer, what: str) -> TokenizerFiles:
    """Return a GGUF file's tokenizer whose chat templates write the bos token that the file puts before texts.

    llama.cpp's server cuts the text of a chat as any other, so that a bos stands before it where `add_bos_token` is
    true; of two it removes one (ggml-org/llama.cpp#15326, common/chat.cpp). Transformers leaves the bos to templates.

    Args:
        files: the tokenizer as it was read from the file.
        tokenizer: the same, opened.
        what: the file, for the line that says so.
    """
    bos = files.tokenizer_config.get("bos_token")
    if not isinstance(bos, str) or not _begins_texts(bos, tokenizer):
        return files
    templates = named_templates(files.tokenizer_config)
    changed = {name: _BOS + text for name, text in templates.items() if _lacks(text, files.tokenizer_config, bos)}
    if not changed:
        return files
    made = [{"name": name, "template": text} for name, text in (templates | changed).items()]
    config = {**files.tokenizer_config, "chat_template": made if len(made) > 1 else made[0]["template"]}
    note = f"{what}: the chat template does not begin with {shown_text(bos)}; it is put there, as llama.cpp does"
    return replace(files, tokenizer_config=config, notes=(*files.notes, note))


def _begins_texts(bos: str, tokenizer: Tokenizer) -> bool:
    around, bare = (tokenizer.encode("a", special_tokens=special)[:1] for special in (True, False))
    return around != bare and around == [tokenizer.vocabulary().get(bos)]


def _lacks(text: str, config: Mapping[str, Any], bos: str) -> bool:
    """Return whether a template writes chats, and none of them begins with the bos token."""
    template, found = ChatTemplate(text, config), False
    for chat in PROBE_CHATS:
        try:
            written = template.render(chat.messages, chat.prompt, chat.tools, chat.arguments)
        except RequestError:
            continue
        if written.lstrip().startswith(bos):
            return False
        found = True
    return found
