"""Tokenizers of models that call tools, each with a template and the tokens that its calls are made of."""

from functools import cache

import tokenizers

from helpers.chat_templates import TEMPLATES
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Tokenizer

# The tokens of calls that have no text, as the models have them. Those of Hermes are words like others.
SPECIAL = {
    "llama": ("<|python_tag|>", "<|eot_id|>"),
    "mistral": ("[TOOL_CALLS]", "[INST]"),
    "mistral-args": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "phi": ("<|tool_call|>", "<|/tool_call|>"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
}
SPECIAL["lfm"] = ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>")
SPECIAL["unknown"] = ("<call to=", "</call>", "<assistant>")
SPECIAL["glm-dense"] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SPECIAL["gpt-oss"] = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
SPECIAL["kimi"] = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
SPECIAL["deepseek-dsml"] = SPECIAL["deepseek-dsml-calls"] = ("｜DSML｜", "<｜assistant｜>")
SPECIAL["gemma-4"] = ("<|tool_call>", "<tool_call|>", '<|"|>')
SPECIAL["deepseek-plain"] = SPECIAL["deepseek"]


@cache
def tool_model(name: str) -> Tokenizer:
    """The tokenizer of a model with the template `name`, "" for none. Two of its tokens are words."""
    made = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.add_special_tokens(list(SPECIAL.get(name, ())))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": False}
    return Tokenizer(made.to_str(), config, TEMPLATES.get(name, ""))
