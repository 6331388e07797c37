"""`picompile chat`: talk with a model in the terminal."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from picompile.cli.options import CompiledArgument, DebugOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile_runtime.run_options import RUN_OPTIONS, SAMPLING

if TYPE_CHECKING:
    from picompile.cli.chat_session import ChatSession
    from picompile_runtime.engine.engine import Engine
    from picompile_runtime.sampling.chat_answer import ChatOptions

CHAT_OPTIONS = {key: RUN_OPTIONS[key] for key in ("max_tokens", *SAMPLING, "draft", "threads", "replan")} | {
    "max_tokens": replace(
        RUN_OPTIONS["max_tokens"],
        help="Tokens of an answer, at most. Default: as many as fit the context.",
        default=None,
    ),
    # That of `run` is for text that can be compared.
    "temperature": replace(RUN_OPTIONS["temperature"], default=0.8, of_model=True),
}


def chat_command(
    model: CompiledArgument,
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and end; - reads it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Go on with a chat that /save wrote.")
    ] = None,
    values: Annotated[dict[str, Any], CHAT_OPTIONS],
    library: LibraryOptions,
    debug: DebugOption = False,
) -> None:
    """Talk with a model; /help in the chat lists its commands.

    Ctrl-C stops an answer, Ctrl-D ends the chat. Without a terminal, each line
    of stdin is a message, and stdout has the answers alone.

    \b
    Examples:
      picompile chat Qwen/Qwen3-0.6B
      picompile chat unsloth/Qwen3-0.6B-GGUF:Q4_K_M --context 8192
      picompile chat build/tiny --system "Answer in one sentence."
      picompile chat build/tiny -p "What is a neuron?" --temp 0
      echo "What is a neuron?" | picompile chat build/tiny -n 64
    """
    from picompile.library import open_model
    from picompile.loading import load_engine
    from picompile_runtime.sampling.chat_answer import ChatOptions
    from picompile_runtime.sampling.option_values import OptionValues

    sampling = OptionValues.of(CHAT_OPTIONS, values)
    with ExitStack() as stack:
        with progress() as shown:
            opened = stack.enter_context(open_model(model, library, shown))
            engine = stack.enter_context(load_engine(opened.artifact, values["threads"], values["replan"], shown))
        params = sampling.params(engine.artifact)
        session = _session(engine, ChatOptions(params, values["max_tokens"], values["draft"]), load, system)
        _chat(session, prompt)


def _session(engine: "Engine", options: "ChatOptions", load: Path | None, system: str | None) -> "ChatSession":
    """Return a chat with the messages and the system prompt that the command line names."""
    from picompile.cli.chat_commands import loaded_text
    from picompile.cli.chat_files import load_chat
    from picompile.cli.chat_screen import say
    from picompile.cli.chat_session import ChatSession
    from picompile_runtime.sampling.chat import Conversation
    from picompile_runtime.sampling.tokenizer import Tokenizer

    tokenizer = Tokenizer.of(engine.artifact)
    if not tokenizer.has_chat_template:
        say("the model has no chat template: it gets a plain dialogue of User: and Assistant:")
    session = ChatSession(
        Conversation(engine, tokenizer, options), str(engine.artifact.manifest.model.get("name", "a model"))
    )
    if load is not None:
        session.conversation.set_messages(load_chat(load))
        say(loaded_text(session, load))
    if system is not None and not session.conversation.set_system(system):
        say("the model's chat template ignores the system prompt")
    return session


def _chat(session: "ChatSession", prompt: str | None) -> None:
    from picompile.cli.chat_input import decoded
    from picompile.cli.chat_loop import chat_from_pipe, chat_on_terminal

    if prompt is not None:
        text = prompt if prompt != "-" else decoded(sys.stdin.buffer.read()).removesuffix("\n")
        if not text.strip():
            raise UsageError("the message is empty; give one with -p TEXT")
        session.ask(text)
    elif sys.stdin.isatty():
        chat_on_terminal(session)
    else:
        chat_from_pipe(session)
