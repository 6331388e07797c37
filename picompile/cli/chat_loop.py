"""The loop of a chat: read something, do or answer it, until the input ends."""

import sys

from picompile.cli.chat_commands import ALIASES, CHAT_COMMANDS, ChatEnd, run_chat_command
from picompile.cli.chat_editor import LineEditor
from picompile.cli.chat_history import ChatHistory, history_path
from picompile.cli.chat_input import ChatInput, read_input, read_piped_line
from picompile.cli.chat_interrupts import ChatInterrupt
from picompile.cli.chat_screen import restored_terminal, say, say_error
from picompile.cli.chat_session import ChatSession
from picompile.errors import PicompileError
from picompile_runtime.errors import PicompileRuntimeError


def chat_from_pipe(session: ChatSession) -> None:
    """Answer the messages of stdin, one a line. The first error ends the chat, and is raised."""
    try:
        while True:
            _handle(session, read_input(read_piped_line))
    except (EOFError, ChatEnd):
        return


def chat_on_terminal(session: ChatSession) -> None:
    """Talk with a user until Ctrl-D, /quit, or Ctrl-C twice. An error is one line, and the chat goes on."""
    editor = LineEditor(ChatHistory(history_path()), [*CHAT_COMMANDS, *ALIASES])
    session.has_blank_lines = True
    say(f"{session.name}, a context of {session.conversation.context} tokens. /help lists the commands, Ctrl-D ends.")
    is_warned = False
    # A signal may come between any two steps, and leave a mode that was set for an answer.
    with restored_terminal(), session.interrupts.handling():
        while True:
            try:
                entry = read_input(editor.read)
            except EOFError:
                _end_line()
                return
            except ChatInterrupt:
                _end_line()
                if is_warned and not editor.has_text():
                    return
                is_warned = True
                say("[Ctrl-C again, or Ctrl-D, ends the chat]")
                continue
            except PicompileError as error:
                _end_line()
                say_error(str(error))
                continue
            is_warned = False
            if not entry.text.strip():
                continue
            editor.add(entry.typed)
            if not _goes_on(session, entry):
                return


def _end_line() -> None:
    print(file=sys.stderr, flush=True)


def _goes_on(session: ChatSession, entry: ChatInput) -> bool:
    """Handle what was typed, and return whether the chat goes on. An error or Ctrl-C costs nothing but that."""
    try:
        _handle(session, entry)
    except ChatEnd:
        return False
    except ChatInterrupt:
        _end_line()
    except (PicompileError, PicompileRuntimeError) as error:
        say_error(_advice(error))
    return True


def _handle(session: ChatSession, entry: ChatInput) -> None:
    if entry.is_command:
        run_chat_command(session, entry.text)
    elif entry.text.strip():
        session.ask(entry.text)


def _advice(error: Exception) -> str:
    """Return the error's line, with the commands that help."""
    from picompile_runtime.sampling.chat import ChatFullError

    text = str(error)
    return (
        f"{text}; /undo takes back the last question, /reset starts anew" if isinstance(error, ChatFullError) else text
    )
