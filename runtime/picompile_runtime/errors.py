"""The errors that the runtime raises on purpose. `exit_code` is the exit code of a command that ends with the error."""

from __future__ import annotations

_MOST_LETTERS = 2000


class PicompileRuntimeError(Exception):
    """Base class of all errors here. Its text is one line: what was wrong, where, and what to do."""

    exit_code = 1

    def __init__(self, text: str) -> None:
        """Make the error with `text`, cleaned up for one line.

        Names that came from a file may contain line breaks and terminal codes; they are shown as `?`. If the text is
        very long, because a name in it is, its middle is left out.
        """
        if len(text) > _MOST_LETTERS:
            text = f"{text[: _MOST_LETTERS // 2]}…{text[-_MOST_LETTERS // 2 :]}"
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in text))


class KernelError(PicompileRuntimeError):
    """A kernel rejected its arguments or failed: a bug in the artifact's code or in the runtime."""


class CacheOverflowError(KernelError):
    """Logits are no numbers, since a key or value is beyond what the KV cache holds: a wider cache is needed."""

    exit_code = 4


class RequestError(PicompileRuntimeError):
    """The caller's request makes no sense or does not fit the model, such as a prompt longer than the context."""

    exit_code = 2


class ArtifactError(PicompileRuntimeError):
    """The artifact is not valid: incomplete, changed, corrupt or of an unknown schema."""

    exit_code = 4


class DoesNotFitError(PicompileRuntimeError):
    """The artifact is valid, but needs more memory than this machine has."""

    exit_code = 5


class MachineError(PicompileRuntimeError):
    """The artifact is valid, but was made for another kind of machine, or its code may not run here."""

    exit_code = 6
