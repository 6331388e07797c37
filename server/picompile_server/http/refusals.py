"""Fields of other servers, or of OpenAI's, that would change an answer and that this server does not have.

Unknown fields are ignored, as other servers do. To ignore one of these would be to answer another question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A field that is rejected unless its value is one of `neutral`, which have no effect. `hint` says what to do."""

    name: str
    neutral: tuple[Any, ...] = ()
    hint: str = "leave it out"
    is_false_neutral: bool = True
    is_negative_neutral: bool = False


_ALWAYS_NEUTRAL: tuple[Any, ...] = (None, False, [], {})

_TOKENS = (
    Refusal("truncate_prompt_tokens", hint="shorten the chat"),
    Refusal("return_token_ids", hint="use /v1/completions"),
)
# For every way to ask for a text.
SAMPLING = (
    *(Refusal(name, hint="use structured_outputs") for name in ("guided_regex", "guided_choice", "guided_grammar")),
    Refusal("guided_json", hint="use response_format"),
    Refusal("use_beam_search"),
    Refusal("length_penalty", (1,)),
    Refusal("min_tokens", (0,)),
    Refusal("stop_token_ids", hint="use stop"),
    Refusal("bad_words", hint="use logit_bias"),
    Refusal("allowed_token_ids", hint="use structured_outputs or logit_bias"),
    Refusal("logits_processors"),
    Refusal("include_stop_str_in_output"),
    # False asks for something, so it is not neutral.
    Refusal("skip_special_tokens", (True,), is_false_neutral=False),
    Refusal("return_tokens_as_token_ids"),
    Refusal("vllm_xargs"),
    Refusal("mirostat", (0,)),
    Refusal("typical_p", (1,)),
    Refusal("tfs_z", (1,)),
    Refusal("dry_multiplier", (0,)),
    Refusal("xtc_probability", (0,)),
    Refusal("dynatemp_range", (0,)),
    Refusal("n_probs", (0,), "use logprobs"),
    Refusal("samplers"),
    Refusal("lora"),
    Refusal("return_progress"),
    Refusal("response_fields"),
    Refusal("repeat_last_n", (-1,)),
    Refusal("top_n_sigma", (-1, 0)),
    Refusal("top_a", (0,)),
    Refusal("adaptive_target", is_negative_neutral=True),
    Refusal("repetition_detection", ({"max_pattern_size": 0},)),
    Refusal("n_cmpl", (1,), "use n"),
    Refusal("min_keep", (0, 1)),
    Refusal("n_keep", (0,), "a full context ends the answer"),
    Refusal("n_indent", (0,)),
    Refusal("t_max_predict_ms", (0,), "use max_tokens"),
    # Ollama's and those of Hugging Face's `generate`.
    Refusal("num_predict", hint="use max_tokens"),
    Refusal("options", hint="give its members by OpenAI's names"),
    Refusal("format", ("",), "use response_format"),
    Refusal("system", ("",), "use a message of the role system"),
    Refusal("max_new_tokens", hint="use max_tokens"),
    Refusal("do_sample", (True,), "use temperature"),
)
COMPLETION = (
    *SAMPLING,
    Refusal("suffix", ("",), "the model only continues texts"),
    Refusal("prompt_embeds", hint="send a prompt"),
    Refusal("add_special_tokens", (True,), "send token ids"),
    Refusal("top_logprobs", (0,), "use logprobs"),
    Refusal("messages", hint="use /v1/chat/completions"),
    Refusal("tools", hint="use /v1/chat/completions"),
)
CHAT = (
    *SAMPLING,
    *_TOKENS,
    Refusal("audio"),
    Refusal("modalities", (["text"],), "the model writes text alone"),
    Refusal("functions", hint="use tools"),
    Refusal("function_call", ("none", "auto"), "use tool_choice"),
    Refusal("web_search_options"),
    *(Refusal(name, hint="use chat_template_kwargs") for name in ("think", "thinking", "enable_thinking")),
    *(Refusal(name, (-1,), "use max_tokens") for name in ("thinking_budget", "thinking_token_budget")),
    Refusal("include_reasoning", (True,), "reasoning is apart from the content", is_false_neutral=False),
    Refusal("echo"),
    Refusal("best_of", (1,), "use n"),
    Refusal("add_generation_prompt", (True,)),
    Refusal("add_special_tokens", hint="the chat template writes the special tokens"),
    Refusal("continue_final_message"),
    Refusal("chat_template", hint="the model's own template is used"),
    Refusal("documents"),
    Refusal("prompt_logprobs", hint="use /v1/completions"),
    Refusal("mm_processor_kwargs"),
)
# What the other endpoints take, and this one does not.
_CHAT_ONLY = (
    *("messages", "response_format", "json_schema", "grammar", "structured_outputs", "logprobs", "logit_bias", "seed"),
    *("stop", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("ignore_eos", "timings_per_token"),
)
_STATELESS = "the server keeps no responses; send the whole conversation as input"
RESPONSES = (
    *_TOKENS,
    *(Refusal(name, hint="use /v1/chat/completions") for name in _CHAT_ONLY),
    *(Refusal(name, hint="use max_output_tokens") for name in ("max_tokens", "max_completion_tokens", "n_predict")),
    Refusal("n", (1,), "use /v1/chat/completions"),
    Refusal("previous_response_id", hint=_STATELESS),
    Refusal("conversation", hint=_STATELESS),
    Refusal("background"),
    Refusal("prompt"),
    Refusal("truncation", ("disabled",), "shorten the input"),
    Refusal("top_logprobs", (0,), "use /v1/chat/completions"),
)
# Anthropic's fields that would change an answer.
MESSAGES = (
    Refusal("mcp_servers", hint="offer their tools as tools"),
    Refusal("container"),
)


def refused_field(data: Mapping[str, Any], refusals: Iterable[Refusal]) -> Refusal | None:
    """Return the first of `refusals` that applies to a request's fields, None if none does."""
    for refusal in refusals:
        if refusal.name not in data:
            continue
        value = data[refusal.name]
        neutral = (*_ALWAYS_NEUTRAL, *refusal.neutral)
        if refusal.is_negative_neutral and isinstance(value, int | float) and value < 0:
            continue
        if (value is False and not refusal.is_false_neutral) or not any(_is_same(value, each) for each in neutral):
            return refusal
    return None


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether two JSON values are the same; in Python, 0 equals False, too."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
