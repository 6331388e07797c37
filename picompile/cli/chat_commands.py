"""The commands of a chat: what begins with a slash."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.cli.chat_files import load_chat, save_chat
from picompile.cli.chat_screen import say
from picompile.cli.chat_session import ChatSession
from picompile.errors import UsageError
from picompile.quantities import shortened

if TYPE_CHECKING:
    from picompile_runtime.sampling.chat_answer import ChatAnswerStats, ChatOptions

_NONE = "none"


@dataclass(frozen=True)
class ChatCommand:
    """A command: how it is written, what it does in a few words, and the function that does it."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], None]


class ChatEnd(Exception):  # noqa: N818 (not an error)
    """The user wants to end the chat."""


def run_chat_command(session: ChatSession, line: str) -> None:
    """Do what a line says that begins with a slash.

    Raises:
        ChatEnd: the chat ends.
        UsageError, RequestError: the command is unknown, or cannot be done.
    """
    name, _, rest = line.strip().partition(" ")
    name = ALIASES.get(name, name)
    if name not in CHAT_COMMANDS:
        raise UsageError(f"unknown command {shortened(name)}; /help lists them, and // begins a message with a slash")
    CHAT_COMMANDS[name].run(session, rest.strip())


def _help(session: ChatSession, rest: str) -> None:
    width = max(len(command.usage) for command in CHAT_COMMANDS.values())
    for command in CHAT_COMMANDS.values():
        say(f"{command.usage:{width}}  {command.help}")
    say('""" begins and ends a message of several lines; a line that ends with \\ goes on in the next one.')
    say("// begins a message with a slash. Ctrl-C stops an answer or clears the line, Ctrl-D ends the chat.")


def _system(session: ChatSession, rest: str) -> None:
    conversation = session.conversation
    if not rest:
        say(conversation.system or "no system prompt is set (a chat template may write its own); /system TEXT sets one")
        return
    text = "" if rest == '""' else rest
    is_used = conversation.set_system(text)
    what = "system prompt set" if text else "system prompt removed"
    if not is_used:
        say(f"{what}, but the model's chat template ignores it")
    elif conversation.messages[1 if text else 0 :]:
        say(f"{what}; the chat goes on with it: the next answer reads the chat anew")
    else:
        say(what)


def _regenerate(session: ChatSession, rest: str) -> None:
    session.answer_again()


def _undo(session: ChatSession, rest: str) -> None:
    say(f"took back the question {shortened(repr(session.conversation.undo()))}")


def _reset(session: ChatSession, rest: str) -> None:
    session.conversation.reset()
    say("the chat starts anew" + (", with the same system prompt" if session.conversation.system else ""))


def _save(session: ChatSession, rest: str) -> None:
    _save_to(session, rest, overwrite=False)


def _save_over(session: ChatSession, rest: str) -> None:
    _save_to(session, rest, overwrite=True)


def _save_to(session: ChatSession, rest: str, *, overwrite: bool) -> None:
    path = _path(rest, "/save")
    messages = session.conversation.messages
    save_chat(path, messages, overwrite=overwrite)
    say(f"{len(messages)} messages saved in {path}")


def _load(session: ChatSession, rest: str) -> None:
    path = _path(rest, "/load")
    session.conversation.set_messages(load_chat(path))
    say(loaded_text(session, path))


def loaded_text(session: ChatSession, path: Path) -> str:
    """Return what is to be said about a chat that was loaded."""
    messages = session.conversation.messages
    text = f"{len(messages)} messages of {path}: {_size(session)}"
    return f"{text}; /regen answers the last one" if messages and messages[-1].role == "user" else text


def _path(text: str, command: str) -> Path:
    if not text:
        raise UsageError(f"{command} needs the name of a file")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # a user that does not exist
        raise UsageError(f"{text}: {error}") from error


def _size(session: ChatSession) -> str:
    tokens, context = session.conversation.token_count(), session.conversation.context
    return f"{tokens} of {context} tokens, {max(0, context - tokens)} left"


def _stats(session: ChatSession, rest: str) -> None:
    say(f"context   {_size(session)}")
    for line in _answer_lines(session.last) if session.last else ["no answer yet"]:
        say(line)


_ENDS = {
    "eos": "ended by the model",
    "stop": "ended at a stop text",
    "max_tokens": "cut at max-tokens",
    "context": "cut at the end of the context",
}


def _answer_lines(stats: "ChatAnswerStats") -> list[str]:
    read = stats.prompt_tokens - stats.reused_tokens
    lines = [
        f"prompt    {read} tokens read at {stats.prompt_tokens_per_s:.0f}/s, {stats.reused_tokens} reused",
        f"answer    {stats.generated_tokens} tokens at {stats.answer_tokens_per_s:.1f}/s, "
        f"the first after {stats.time_to_first_token_s:.2f} s, {_ENDS.get(stats.stop_reason, 'stopped')}",
    ]
    if stats.fired_share is not None and stats.computed_share is not None:
        lines.append(f"neurons   {stats.fired_share:.1%} fired, {stats.computed_share:.1%} computed")
    return lines


# What `/set` changes: a field of the sampling parameters, or of the chat's options, and the type of its values.
_SETTINGS: dict[str, tuple[str, type[int] | type[float]]] = {
    "temp": ("temperature", float),
    "top-k": ("top_k", int),
    "top-p": ("top_p", float),
    "min-p": ("min_p", float),
    "repetition-penalty": ("repetition_penalty", float),
    "seed": ("seed", int),
    "max-tokens": ("max_tokens", int),
}
_MAY_BE_NONE = ("seed", "max-tokens")


def _set(session: ChatSession, rest: str) -> None:
    name, _, text = rest.replace("=", " ", 1).partition(" ")
    if name and name not in _SETTINGS:
        raise UsageError(f"/set knows {', '.join(_SETTINGS)}, not {shortened(name)}")
    conversation = session.conversation
    if text:
        conversation.options = _changed(conversation.options, name, text.strip())
    settings = {key: _shown(conversation.options, key) for key in _SETTINGS}
    say(", ".join(f"{key} {value}" for key, value in settings.items() if not name or key == name))


def _shown(options: "ChatOptions", name: str) -> str:
    key, _ = _SETTINGS[name]
    value = getattr(options, key) if hasattr(options, key) else getattr(options.params, key)
    return _NONE if value is None else str(value)


def _changed(options: "ChatOptions", name: str, text: str) -> "ChatOptions":
    """Return the options with another value. Raise `UsageError` or `RequestError`."""
    key, kind = _SETTINGS[name]
    change: dict[str, Any] = {key: None if text == _NONE and name in _MAY_BE_NONE else _number(name, kind, text)}
    if hasattr(options, key):
        return replace(options, **change)
    return replace(options, params=replace(options.params, **change))


def _number(name: str, kind: type[int] | type[float], text: str) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        must = "a whole number" if kind is int else "a number"
        other = f" or {_NONE}" if name in _MAY_BE_NONE else ""
        raise UsageError(f"{name} must be {must}{other}, not {shortened(repr(text))}") from error


def _quit(session: ChatSession, rest: str) -> None:
    raise ChatEnd


CHAT_COMMANDS: dict[str, ChatCommand] = {
    "/help": ChatCommand("/help", "list the commands", _help),
    "/system": ChatCommand("/system [TEXT]", 'show or set the system prompt; /system "" removes it', _system),
    "/regen": ChatCommand("/regen", "answer the last question again", _regenerate),
    "/undo": ChatCommand("/undo", "take back the last question and its answer", _undo),
    "/reset": ChatCommand("/reset", "forget the chat, but not the system prompt", _reset),
    "/save": ChatCommand("/save FILE", "write the chat as JSON; /save! overwrites", _save),
    "/save!": ChatCommand("/save! FILE", "write the chat over another one", _save_over),
    "/load": ChatCommand("/load FILE", "go on with a chat that was saved", _load),
    "/set": ChatCommand("/set [NAME [VALUE]]", f"show or change: {', '.join(_SETTINGS)}", _set),
    "/stats": ChatCommand("/stats", "tokens, speeds, and the share of neurons that fired", _stats),
    "/quit": ChatCommand("/quit", "end the chat", _quit),
}
ALIASES = {"/?": "/help", "/exit": "/quit", "/bye": "/quit"}
