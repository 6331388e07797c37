"""The tokenizer of a GGUF file, kept by all that it is made of: everything in the file before its first tensor.

It is made of lists of all tokens and merges, and its chat template is compared with transformers' own renderer, which
takes a second or two.
"""

import json
from contextlib import suppress
from pathlib import Path

from picompile.compile.structure.key import compiler_identity
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.outline import metadata_digest
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_codegen.build.object_cache import find_object, keep_object, object_key

_FIELDS = ("tokenizer_json", "tokenizer_config", "generation_config")


def known_tokenizer(header: GgufHeader, model: Path, vocabulary: int) -> TokenizerFiles:
    """Return the tokenizer of `model`, a file with this `header`, as `read_tokenizer` does. Raises as that does."""
    kept = find_object(_key(header, vocabulary))
    if kept is not None:
        with suppress(ValueError, TypeError):
            return TokenizerFiles(**dict(zip(_FIELDS, json.loads(kept), strict=True)))
    from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer
    from picompile.frontend.tokenizer.complete import Source, completed

    files = completed(read_gguf_tokenizer(header), model, vocabulary, Source(is_gguf=True))
    keep_tokenizer(files, header, vocabulary)
    return files


def keep_tokenizer(files: TokenizerFiles, header: GgufHeader, vocabulary: int) -> None:
    """Keep the tokenizer of a file, unless there is something to be said of it, which names the file."""
    if files.reason is None and not files.notes:
        content = json.dumps([getattr(files, name) for name in _FIELDS])
        keep_object(_key(header, vocabulary), content.encode())


def _key(header: GgufHeader, vocabulary: int) -> str:
    return object_key("tokenizer", metadata_digest(header), str(vocabulary), *compiler_identity())
