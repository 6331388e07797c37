"""Every error that the runtime raises on purpose; `exit_code` is what a command ends with."""

from __future__ import annotations

_MOST_LETTERS = 2000


class PicompileRuntimeError(Exception):
    """Root of the tree. Its text is one line: what was wrong, where, and what to do."""

    exit_code = 1

    def __init__(self, text: str) -> None:
        """Names that came from a file may have line breaks and terminal codes in them; they are shown as `?`. Of a text
        that has a very long name in it, the middle is left out.
        """
        if len(text) > _MOST_LETTERS:
            text = f"{text[: _MOST_LETTERS // 2]}…{text[-_MOST_LETTERS // 2 :]}"
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in text))


class KernelError(PicompileRuntimeError):
    """A kernel refused its arguments or failed: a bug in the artifact's code or in the runtime."""


class RequestError(PicompileRuntimeError):
    """What the caller asked for makes no sense or does not fit the model, such as a prompt longer than the context."""

    exit_code = 2


class ArtifactError(PicompileRuntimeError):
    """The artifact is not valid: incomplete, changed, corrupt or of an unknown schema."""

    exit_code = 4


class DoesNotFitError(PicompileRuntimeError):
    """The artifact is valid, but needs more memory than this machine has."""

    exit_code = 5


class MachineError(PicompileRuntimeError):
    """The artifact is valid, but made for another kind of machine."""

    exit_code = 6
