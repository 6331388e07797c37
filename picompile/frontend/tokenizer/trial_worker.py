"""The first reading of a stranger's tokenizer.json, in a process under limits; see trial.py.

It imports nothing of this package: the process has other things to load.
"""

from collections.abc import Callable, Mapping
from typing import Any

# A letter of four bytes may be as many tokens, and a text without words has some around it.
_MOST_FOLD = 32


def handler(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that reads the tokenizer in the file `start["file"]`, and has it encode and decode `texts`."""

    def read(request: Mapping[str, Any]) -> Mapping[str, Any]:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(start["file"])
            tokenizer.no_truncation()
            tokenizer.no_padding()
            for around in (False, True):
                for text in request["texts"]:
                    ids = tokenizer.encode(text, add_special_tokens=around).ids
                    written = tokenizer.decode(ids, skip_special_tokens=around)
                    if max(len(ids), len(written)) > _MOST_FOLD * (len(text) + _MOST_FOLD):
                        raise ValueError(
                            f"a text of {len(text)} letters becomes {len(ids)} tokens and {len(written)} letters"
                        )
        except Exception:
            raise
        except BaseException as error:  # a panic of the tokenizers package is no Exception
            raise ValueError(str(error) or type(error).__name__) from error
        return {}

    return read
