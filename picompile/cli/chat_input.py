"""Reading what is typed in a chat: messages of one line or several, and commands."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from picompile.errors import UsageError

BLOCK = '"""'
_PROMPT, _MORE = "> ", ". "

# Reads a line behind a prompt; raises EOFError at the end of the input.
ReadLine = Callable[[str], str]


@dataclass(frozen=True)
class ChatInput:
    """Something that was typed.

    Attributes:
        text: the message, or the line of a command.
        is_command: whether it is a command.
        typed: what was typed, in one piece: typed again, it means the same.
    """

    text: str
    is_command: bool
    typed: str


def read_input(read_line: ReadLine) -> ChatInput:
    '''Return the next message or command.

    A line that begins with """ begins a block, which a line that ends with """ ends. A block is always a message.
    Elsewhere a line that ends with a backslash goes on in the next one. A pasted text, which has several lines, is a
    message as it is.

    Raises EOFError at the end of the input, and `UsageError` if that is inside a message.
    '''
    typed = read_line(_PROMPT)
    if typed.startswith(BLOCK):
        while not typed.rstrip().endswith(BLOCK) or len(typed.rstrip()) < 2 * len(BLOCK):
            typed += "\n" + _next_line(read_line, f"a message that begins with {BLOCK} must end with {BLOCK}")
        text = typed.rstrip().removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
        return ChatInput(text, is_command=False, typed=typed)
    while typed.endswith("\\"):
        typed = typed[:-1] + "\n" + _next_line(read_line, "the last line ends with a backslash, and nothing follows")
    if typed.startswith("//"):
        return ChatInput(typed[1:], is_command=False, typed=typed)
    return ChatInput(typed, typed.startswith("/"), typed)


def _next_line(read_line: ReadLine, otherwise: str) -> str:
    try:
        return read_line(_MORE)
    except EOFError as error:
        raise UsageError(otherwise) from error


def read_piped_line(prompt: str) -> str:
    """Return the next line of stdin, without a prompt."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decoded(line).removesuffix("\n").removesuffix("\r")


def decoded(data: bytes) -> str:
    """Return text from stdin. Raise `UsageError` if it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start})") from error
