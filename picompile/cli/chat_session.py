"""A chat as a user sees it: questions, answers, and what is to be said about them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from picompile.cli.chat_interrupts import ChatInterrupt, ChatInterrupts
from picompile.cli.chat_screen import say, silent_keys, write_answer

if TYPE_CHECKING:
    from picompile_runtime.sampling.chat import Conversation
    from picompile_runtime.sampling.chat_answer import ChatAnswer, ChatAnswerStats

_NEARLY_FULL = 8  # an eighth of the context is left


@dataclass
class ChatSession:
    """A conversation on this terminal, or in this pipe.

    Attributes:
        conversation: the messages, and the engine that answers.
        name: the model's name.
        has_blank_lines: whether a blank line follows each answer.
        interrupts: what Ctrl-C does.
        last: the stats of the last answer.
    """

    conversation: "Conversation"
    name: str
    has_blank_lines: bool = False
    interrupts: ChatInterrupts = field(default_factory=ChatInterrupts)
    last: "ChatAnswerStats | None" = None

    def ask(self, text: str) -> None:
        """Write the answer to a question. Raise `RequestError` if the chat cannot take the question."""
        self._show(self.conversation.ask(text))

    def answer_again(self) -> None:
        """Write another answer to the last question. Raise `RequestError` if there is none."""
        self._show(self.conversation.answer_again())

    def _show(self, answer: "ChatAnswer") -> None:
        is_interrupted = False
        try:
            with silent_keys(), self.interrupts.calling(answer.cancel):
                write_answer(answer)
        except ChatInterrupt:
            is_interrupted = True
        self.last = answer.stats
        if is_interrupted or self.last.stop_reason == "cancelled":
            self._say_stopped(answer)
        else:
            self._say_end(answer.text, self.last)
        if self.has_blank_lines:
            say("")

    def _say_stopped(self, answer: "ChatAnswer") -> None:
        if answer.text:
            say("[stopped]")
        else:
            self.conversation.revert()
            say("[stopped before the answer began; the chat is as it was before]")

    def _say_end(self, text: str, stats: "ChatAnswerStats") -> None:
        """Tell why the answer ended if that was not the model's wish, and when the chat will soon have no room."""
        context = self.conversation.context
        if stats.stop_reason == "context":
            say(f"[the context of {context} tokens is full; /undo takes the answer back, /reset starts anew]")
            return
        if stats.stop_reason == "max_tokens":
            say(f"[cut at {stats.generated_tokens} tokens; -n N, or /set max-tokens N, allows more]")
        elif not text.strip():
            say("[the model had nothing to say; /regen tries again]")
        left = context - stats.prompt_tokens - stats.generated_tokens
        if left < context // _NEARLY_FULL:
            say(f"[the chat is nearly full: {left} of {context} tokens are left]")
