"""The formats in which models reason before they answer: the texts around the reasoning, which chat templates have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around a model's reasoning.

    An answer is: begin, reasoning, end, between, before_answer, answer. The prompt may have `begin` already, and an
    answer without reasoning may begin with `before_answer` or with the answer itself. Calls of tools stand behind
    `between`.

    Attributes:
        name: what it is known as.
        begin, end: the texts around the reasoning.
        between: what follows the reasoning, whatever comes next.
        before_answer: what stands before an answer that is text.
    """

    name: str
    begin: str
    end: str
    between: str = ""
    before_answer: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts around reasoning and answer."""
        return self.begin, self.end, self.between, self.before_answer


# DeepSeek R1 to V3.2, Qwen 3, QwQ, GLM 4.5 to 4.7, MiniMax M2, Kimi K2 Thinking, Nemotron, SmolLM 3, EXAONE 4,
# Hunyuan, Granite 3.3, OLMo 3 Think, Phi 4 reasoning, LFM 2.5 Thinking.
THINK = ReasoningFormat("think", "<think>", "</think>")
# Seed-OSS.
SEED_THINK = ReasoningFormat("seed-think", "<seed:think>", "</seed:think>")
# Magistral and Ministral 3 Reasoning.
MISTRAL_THINK = ReasoningFormat("mistral-think", "[THINK]", "[/THINK]")
# Command R7B and Command A Reasoning.
COHERE_THINK = ReasoningFormat("cohere-think", "<|START_THINKING|>", "<|END_THINKING|>")
# Gemma 4.
GEMMA_THOUGHT = ReasoningFormat("gemma-thought", "<|channel>thought\n", "<channel|>")
# gpt-oss: the channels of OpenAI's harmony format (github.com/openai/harmony).
HARMONY = ReasoningFormat(
    "harmony",
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    between="<|start|>assistant",
    before_answer="<|channel|>final<|message|>",
)

REASONING_FORMATS = (THINK, SEED_THINK, MISTRAL_THINK, COHERE_THINK, GEMMA_THOUGHT, HARMONY)

# What a template has whose model reasons so; the first that fits is the model's.
_SIGNS: tuple[tuple[Callable[[str], bool], ReasoningFormat], ...] = (
    (lambda text: "<|channel|>analysis<|message|>" in text, HARMONY),
    (lambda text: "<|channel>" in text and "<channel|>" in text, GEMMA_THOUGHT),
    (lambda text: "</seed:think>" in text or "<seed:think>" in text, SEED_THINK),
    (lambda text: "<|END_THINKING|>" in text, COHERE_THINK),
    (lambda text: "[/THINK]" in text, MISTRAL_THINK),
    (lambda text: "</think>" in text or "<think>" in text, THINK),
)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return how the model with this chat template writes its reasoning; None if the template has no such text.

    A template has these texts as they are: it writes them around reasoning of earlier turns, cuts them out of it, or
    ends a prompt with one. A model of which a template only says so, and that does not reason, is read alike.
    """
    return next((found for fits, found in _SIGNS if fits(template)), None)


def is_open(style: ReasoningFormat, prompt: str) -> bool:
    """Return whether a prompt that ends with the text `prompt` has begun the reasoning that the answer continues."""
    return prompt.rstrip().endswith(style.begin.rstrip())


def is_closed(style: ReasoningFormat, prompt: str) -> bool:
    """Return whether a prompt that ends with the text `prompt` has ended the reasoning: the answer is to have none."""
    return prompt.rstrip().endswith(style.end)
