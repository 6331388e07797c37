"""The formats in which models write tool calls, and how a model's is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from picompile_server.reasoning_formats import HARMONY
from picompile_server.tool_format import BracedArguments, KeywordArguments, TaggedArguments, ToolFormat

# Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 3; and models that know no tools are told of this one.
HERMES = ToolFormat(
    name="hermes",
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_arguments="}\n</tool_call>",
    between="\n",
    proof='<tool_call>\n{"name": "f", "arguments": {"needle": 1}',
)
# How calls of earlier turns are written if the template leaves them out, and the model's own format is not known.
PLAIN = ToolFormat(name="plain", trigger='{"name"', between="\n")
# EXAONE 4, which has no line breaks.
HERMES_DENSE = ToolFormat(
    name="hermes-dense",
    trigger="<tool_call>",
    before_name='<tool_call>{"name": "',
    after_arguments="}</tool_call>",
    proof='<tool_call>{"name": "f", "arguments": {"needle": 1}',
)
# Llama 3.1 to 3.3, whose template refuses several calls in one message.
LLAMA = ToolFormat(
    name="llama",
    trigger='{"name"',
    before_arguments='", "parameters": ',
    is_whole=True,
    before="<|python_tag|>",
    most_calls=1,
    proof='{"name": "f", "parameters": {"needle": 1}',
)
# Mistral 7B v0.3, Nemo, Small 3.
MISTRAL = ToolFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    has_short_ids=True,
)
# Mistral from tokenizer v11 on: Small 3.2, Magistral, Devstral.
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    trigger="[TOOL_CALLS]",
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    has_short_ids=True,
)
# Granite 3.
GRANITE = ToolFormat(
    name="granite",
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
)
# Phi 4 mini.
PHI = ToolFormat(
    name="phi",
    trigger="<|tool_call|>",
    before_name='<|tool_call|>{"name": "',
    after_arguments="}<|/tool_call|>",
)
# DeepSeek R1 and V3.
DEEPSEEK = ToolFormat(
    name="deepseek",
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```<｜tool▁call▁end｜>",
    between="\n",
    end="<｜tool▁calls▁end｜>",
)
# DeepSeek V3.1.
DEEPSEEK_PLAIN = ToolFormat(
    name="deepseek-plain",
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)

# Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step 3.5.
QWEN_XML = ToolFormat(
    name="qwen-xml",
    trigger="<tool_call>",
    before_name="<tool_call>\n<function=",
    before_arguments=">\n",
    after_arguments="</function>\n</tool_call>",
    between="\n",
    arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
)
# Seed-OSS.
SEED = ToolFormat(
    name="seed",
    trigger="<seed:tool_call>",
    before_name="<seed:tool_call>\n<function=",
    before_arguments=">\n",
    after_arguments="</function>\n</seed:tool_call>",
    between="\n",
    arguments=TaggedArguments("<parameter=", ">", "</parameter>\n"),
)
# GLM 4.5 and 4.6.
GLM = ToolFormat(
    name="glm",
    trigger="<tool_call>",
    before_name="<tool_call>",
    before_arguments="\n",
    after_arguments="</tool_call>",
    between="\n",
    arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
# GLM 4.7, which has no line breaks.
GLM_DENSE = ToolFormat(
    name="glm-dense",
    trigger="<tool_call>",
    before_name="<tool_call>",
    before_arguments="",
    after_arguments="</tool_call>",
    arguments=TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
# MiniMax M2.
MINIMAX = ToolFormat(
    name="minimax",
    trigger="<minimax:tool_call>",
    begin="<minimax:tool_call>\n",
    before_name='<invoke name="',
    before_arguments='">\n',
    after_arguments="</invoke>\n",
    end="</minimax:tool_call>",
    arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
)
# DeepSeek V3.2, by its encoding_dsv32.py; its template comes from others.
DEEPSEEK_DSML = ToolFormat(
    name="deepseek-dsml",
    trigger="<｜DSML｜function_calls>",
    begin="<｜DSML｜function_calls>\n",
    before_name='<｜DSML｜invoke name="',
    before_arguments='">\n',
    after_arguments="</｜DSML｜invoke>\n",
    end="</｜DSML｜function_calls>",
    arguments=TaggedArguments(
        '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n", before_text='" string="true">'
    ),
)
# DeepSeek V4.
DEEPSEEK_DSML_CALLS = replace(
    DEEPSEEK_DSML,
    name="deepseek-dsml-calls",
    trigger="<｜DSML｜tool_calls>",
    begin="<｜DSML｜tool_calls>\n",
    end="</｜DSML｜tool_calls>",
)
# LFM 2 and 2.5.
LFM = ToolFormat(
    name="lfm",
    trigger="<|tool_call_start|>",
    begin="<|tool_call_start|>[",
    before_name="",
    before_arguments="(",
    after_arguments=")",
    between=", ",
    end="]<|tool_call_end|>",
    arguments=KeywordArguments(),
)
# OLMo 3.
OLMO = ToolFormat(
    name="olmo",
    trigger="<function_calls>",
    begin="<function_calls>",
    before_name="",
    before_arguments="(",
    after_arguments=")",
    between="\n",
    end="</function_calls>",
    arguments=KeywordArguments(is_json=True),
)
# Llama 3.2 and 4 where the template asks for Python.
LLAMA_PYTHON = ToolFormat(
    name="llama-python",
    trigger="[",
    begin="[",
    before_name="",
    before_arguments="(",
    after_arguments=")",
    between=", ",
    end="]",
    arguments=KeywordArguments(),
    is_whole=True,
    before="<|python_start|>",
)
# Apriel 1.5, Hunyuan A13B.
TAGGED_LIST = ToolFormat(
    name="tagged-list",
    trigger="<tool_calls>",
    begin="<tool_calls>[",
    between=", ",
    end="]</tool_calls>",
)
# Gemma 4, whose template writes arguments in order of their names.
GEMMA = ToolFormat(
    name="gemma-4",
    trigger="<|tool_call>",
    before_name="<|tool_call>call:",
    before_arguments="{",
    after_arguments="}<tool_call|>",
    arguments=BracedArguments('<|"|>'),
)
# Nemotron Nano 2.
NEMOTRON = ToolFormat(
    name="nemotron",
    trigger="<TOOLCALL>",
    begin="<TOOLCALL>[",
    between=", ",
    end="]</TOOLCALL>",
)
# gpt-oss, in the channels of OpenAI's harmony format. The template refuses several calls in one message.
GPT_OSS = ToolFormat(
    name="gpt-oss",
    trigger="<|channel|>commentary to=functions.",
    before_name="<|channel|>commentary to=functions.",
    before_arguments=" <|constrain|>json<|message|>",
    after_arguments="",
    is_whole=True,
    before_text=HARMONY.before_answer,
    most_calls=1,
    proof='to=functions.f<|channel|>commentary json<|message|>{"needle": 1}',
)
# Kimi K2 and K2 Thinking.
KIMI = ToolFormat(
    name="kimi",
    trigger="<|tool_calls_section_begin|>",
    begin="<|tool_calls_section_begin|>",
    before_name="<|tool_call_begin|>functions.",
    before_arguments="<|tool_call_argument_begin|>",
    after_arguments="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    is_numbered=True,
    proof='<|tool_call_argument_begin|>{"needle": 1}<|tool_call_end|>',
)

FORMATS = (
    *(HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GRANITE, PHI, DEEPSEEK, DEEPSEEK_PLAIN),
    *(HERMES_DENSE, QWEN_XML, SEED, GLM, GLM_DENSE, MINIMAX, LFM, OLMO, LLAMA_PYTHON, NEMOTRON, TAGGED_LIST),
    *(GPT_OSS, KIMI, DEEPSEEK_DSML, DEEPSEEK_DSML_CALLS, GEMMA),
)

# What a template has that writes calls so; the first that fits is the model's.
_SIGNS: tuple[tuple[Callable[[str], bool], ToolFormat | None], ...] = (
    (lambda text: "<|tool_call>call:" in text and "<tool_call|>" in text, GEMMA),
    (lambda text: "｜DSML｜" in text and "function_calls" in text, DEEPSEEK_DSML),
    (lambda text: "｜DSML｜" in text, DEEPSEEK_DSML_CALLS),
    (lambda text: "<seed:tool_call>" in text and "<parameter=" in text, SEED),
    (lambda text: "<minimax:tool_call>" in text and '<parameter name="' in text, MINIMAX),
    (lambda text: "<tool_call>" in text and "<function=" in text and "<parameter=" in text, QWEN_XML),
    (lambda text: "<tool_call>" in text and "</arg_key><arg_value>" in text, GLM_DENSE),
    (lambda text: "<tool_call>" in text and "<arg_key>" in text, GLM),
    (lambda text: any(sign in text for sign in ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ")), LFM),
    (lambda text: "<function_calls>" in text and "<invoke" not in text, OLMO),
    (lambda text: "<|channel|>commentary" in text and "functions." in text, GPT_OSS),
    (lambda text: "<|tool_call_argument_begin|>" in text, KIMI),
    (lambda text: "<TOOLCALL>[" in text, NEMOTRON),
    (lambda text: "<tool_calls>[" in text, TAGGED_LIST),
    (lambda text: "[func_name1(" in text, LLAMA_PYTHON),
    (lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text, MISTRAL_ARGS),
    (lambda text: "[TOOL_CALLS]" in text, MISTRAL),
    (lambda text: "<｜tool▁calls▁begin｜>" in text and "```json" in text, DEEPSEEK),
    (lambda text: "<｜tool▁calls▁begin｜>" in text, DEEPSEEK_PLAIN),
    (lambda text: "<|tool_call|>" in text and "<|/tool_call|>" in text, PHI),
    (lambda text: "<|tool_call|>" in text, GRANITE),
    (lambda text: "<tool_call>{" in text and "```json" not in text, HERMES_DENSE),
    (lambda text: "<tool_call>" in text and "```json" not in text, HERMES),
    (lambda text: re.search(r'\{"name": .*"parameters": ', text, re.DOTALL) is not None, LLAMA),
)


def format_of_call(text: str) -> ToolFormat | None:
    """Return the format of a call `f` with the arguments {"needle": 1} in a template's text; None if none fits."""
    written = {style.write([("f", '{"needle": 1}')]): style for style in FORMATS}
    return written.get(max((call for call in written if call in text), key=len, default=""))


def find_format(template: str) -> ToolFormat | None:
    """Return the format of calls for the model with this chat template; None if it is not known."""
    return next((found for fits, found in _SIGNS if fits(template)), None)
