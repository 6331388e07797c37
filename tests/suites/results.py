"""Results of a suite, test by test, as a Markdown table, and why tests fail that fail. Others are a fault of ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MODEL = "model: it expects the words, or the counts of tokens, of llama.cpp's stories260K"
_OTHER_MODEL = "needs a model of another kind: split, embedding, vision, or llama.cpp's router of several"
_OWN_ANSWER = "asks for a member of llama.cpp's own answer that ours does not have"
_VERBOSE = "asks for llama.cpp's `__verbose`, the prompt as a text; ours tells its tokens by /tokenize"
_PROGRESS = "return_progress, llama.cpp's own, is refused"
_SWITCH = "expects an endpoint to be off; ours cannot be switched off"
_TEMPLATE = (
    "the template wants variables (`date_string`, `functions`) that llama.cpp gives it and transformers does not"
)
_METRICS = "asks for llama.cpp's names of metrics, under `llamacpp:`; ours begin with `picompile_`"

# The first pattern that a test's name matches counts.
REASONS = (
    # vLLM
    (r"test_batch_completions", "use_beam_search is refused: beam search is not what the server has"),
    # llama.cpp, in its order
    (r"test_server_multiple_addresses", "an option for several addresses; ours listens at one"),
    (r"test_server_props", "/props, llama.cpp's own: the paths and settings of its process"),
    (r"test_server_slots|test_no_ui|test_metrics_disabled", _SWITCH),
    (r"test_load_split_model|test_stream::|test_local_media_file|test_metrics_embedding", _OTHER_MODEL),
    (r"test_cors_origins_", _OTHER_MODEL),
    (r"test_server_model_aliases_and_tags", "options for aliases and tags of a model; ours has names, by --model"),
    (r"test_chat_completion(_stream)?\[|test_chat_completion_with_openai_library|_cached_tokens", _MODEL),
    (r"test_chat_template$|test_verbose_debug|test_chat_template_assistant_prefill", _VERBOSE),
    (r"continue_final_message_vllm_compat", "continue_final_message is refused"),
    (r"test_apply_chat_template", "asks for a template by the name that llama.cpp has it under"),
    (
        r"test_invalid_chat_completion_req\[messages7\]",
        "two messages of the assistant in a row are refused by llama.cpp, which would continue the last; we take them",
    ),
    (
        r"test_context_size_exceeded",
        "the error's type is OpenAI's invalid_request_error, with the code context_length_exceeded; the counts agree",
    ),
    (r"test_return_progress|llama_telemetry|timings_on_prompt_progress", _PROGRESS),
    (r"test_chat_completions_token_count", "/chat/completions/input_tokens, llama.cpp's own; ours is /tokenize"),
    (r"test_responses_with_openai_library", _MODEL),
    (r"test_completion(_stream)?\[|test_completion(_stream)?_with_openai_library|_prompt_cache", _MODEL),
    (r"test_nocache_long_input|test_ctx_shift_disabled_(short|long)", f"{_MODEL}; with Llama's the prompt is shorter"),
    (r"test_json_prompt_no_mtmd", "a prompt as an object is llama.cpp's own"),
    (
        r"test_completion_with_tokens_input",
        "a prompt as an object, or of text and tokens, is llama.cpp's own; prompts of tokens, which come first, pass",
    ),
    (r"test_completion_response_fields|test_n_probs|test_ignore_eos", _OWN_ANSWER),
    (r"test_logit_bias\[", "logit_bias for texts, or as a list of pairs, is llama.cpp's own; ours is OpenAI's"),
    (r"test_ctx_shift_enabled", "shifting of a full context is llama.cpp's own; ours ends the answer there"),
    (r"test_ctx_shift_disabled_stream", "n_predict in /v1/completions is refused, with a hint at max_tokens"),
    (
        r"test_metrics_timings_are_finite\[1\]",
        "fired_share is null in an answer of one token, for which no step was counted",
    ),
    (r"test_metrics_(prometheus_format|prompt_processed|predicted_total)", _METRICS),
    (r"test_access_static_assets", "further files of llama.cpp's page; ours is one file, at /"),
    (
        r"test_openai_library_correct_api_key",
        "the client is given an address without /v1; ours has the paths of OpenAI",
    ),
    (r"test_cors_options", "expects every origin to be allowed; ours allows none unless told by --cors"),
    (r"test_cors_proxy", "llama.cpp's own proxy"),
    (r"test_date_inside_prompt", _TEMPLATE),
)


def reason(test: str) -> str | None:
    """Return why a test fails that is expected to, None for others."""
    return next((text for pattern, text in REASONS if re.search(pattern, test)), None)


class Results:
    """A plugin of pytest that notes the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what pytest tells of a test: its set-up, its call and its end, of which the worst counts."""
        file, _, test = report.nodeid.partition("::")
        name = f"{Path(file).stem}::{test}"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr if crash is None else crash.message)
            self.outcomes[name] = "failed", first_line(text).replace("|", "\\|")
        elif report.skipped:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes.setdefault(name, ("skipped", first_line(text.removeprefix("Skipped: "))))
        elif report.when == "call":
            self.outcomes.setdefault(name, ("passed", ""))

    def write(self, path: Path | None) -> bool:
        """Print the counts, write the table, and return whether all tests that failed are expected to."""
        print(dict(Counter(outcome for outcome, _ in self.outcomes.values())))
        unknown = [name for name, (outcome, _) in self.outcomes.items() if outcome == "failed" and reason(name) is None]
        for name in unknown:
            print(f"not expected to fail: {name}: {self.outcomes[name][1]}")
        if path is not None:
            path.write_text(table(self._rows()), encoding="utf-8")
        return not unknown

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for name, (outcome, told) in self.outcomes.items():
            yield name, outcome, (reason(name) or told) if outcome == "failed" else told


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return rows of test, outcome and reason as a Markdown table."""
    lines = ["| test | result | why |", "| --- | --- | --- |"]
    for name, outcome, why in rows:
        told = "`" + name.replace("|", "\\|") + "`"
        lines.append(f"| {told} | {outcome} | {why} |")
    return "\n".join(lines) + "\n"


def first_line(text: str) -> str:
    """Return the first line of a text, shortened."""
    return (text.splitlines() or [""])[0][:160]
