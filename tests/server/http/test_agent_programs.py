"""Programs that people use, unchanged: Codex, Claude Code, Continue's command line and opencode.

Each asks a fake model, which calls the program's tool for commands, and answers when it has the result.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_serving
from helpers.fake_serving import agent_model, client_of, prompt_of, text_tokens
from helpers.serving_process import serving_thread
from picompile_server.model import ServedModel

pytestmark = pytest.mark.slow("runs programs of node and native ones")

QUESTION = "What is here?"
# Each program's name for its tool for commands is here, with that tool's argument.
COMMANDS = {"exec_command": "cmd", "Bash": "command", "bash": "command"}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """A model that lists files by the tool that it is offered, and says what came of it."""
    monkeypatch.setattr(fake_serving, "CONTEXT", 2**20)  # a token is a byte, and the prompts are long
    found = agent_model("")

    def says(request: Any) -> list[int]:
        prompt = str(found.tokenizer.decode(request.prompt))
        tool = next((name for name in COMMANDS if f'"name": "{name}"' in prompt), None)
        if tool is None or "[tool:" in prompt:
            return text_tokens("It has one file.")
        arguments = {COMMANDS[tool]: "ls", "description": "Lists."}
        called = json.dumps({"name": tool, "arguments": arguments})
        return text_tokens(f"<think>\nLook.\n</think>\n\nI look.\n<tool_call>\n{called}\n</tool_call>")

    scheduler: Any = found.scheduler
    scheduler.says = says
    return found


@pytest.fixture
def url(model: ServedModel) -> Iterator[str]:
    with serving_thread(client_of(model).app) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run an installed program in a folder with one file, with a home of its own, and return what it prints."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "only.py").write_text("")

    def run(name: str, *options: str, files: dict[str, str] | None = None, **variables: str) -> str:
        program = Path(os.environ.get("PICOMPILE_TEST_CLIENTS", "")) / "npm" / "node_modules" / ".bin" / name
        if not program.exists():
            pytest.skip(f"{name} is not installed; make test-slow installs it where npm is, or: npm install")
        for path, text in (files or {}).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TMPDIR")}
        # Each program has a variable of its own that keeps it from calling home.
        quiet = ("DO_NOT_TRACK", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "OPENCODE_DISABLE_AUTOUPDATE")
        quiet += ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "OPENCODE_DISABLE_MODELS_FETCH")
        environment = {**kept, **dict.fromkeys(quiet, "1"), "CONTINUE_TELEMETRY_ENABLED": "0", "HOME": str(home)}
        ran = subprocess.run(
            [program, *options],
            cwd=work,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_codex(run: Callable[..., str], url: str, model: ServedModel) -> None:
    config = f"""
model = "fake"
model_provider = "local"
check_for_update_on_startup = false
model_providers.local = {{ name = "local", base_url = "{url}/v1", wire_api = "responses", request_max_retries = 0 }}
analytics.enabled = false
"""
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION)
    assert "It has one file." in run("codex", *options, files={".codex/config.toml": config})
    assert "only.py" in prompt_of(model)


def test_claude_code(run: Callable[..., str], url: str, model: ServedModel) -> None:
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "fake"}
    assert "It has one file." in run("claude", "-p", QUESTION, "--allowedTools", "Bash", **variables)
    assert "[tool:only.py]" in prompt_of(model)


def test_continue(run: Callable[..., str], url: str, model: ServedModel) -> None:
    config = f"""
name: local
version: 0.0.1
schema: v1
models:
- {{name: local, provider: openai, model: fake, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}}
"""
    config_file = ".continue/config.yaml"
    options = ("-p", "--config", f"../home/{config_file}", "--allow", "Bash", QUESTION)
    assert "It has one file." in run("cn", *options, files={config_file: config})
    assert "[tool:only.py\n]" in prompt_of(model)


def test_opencode(run: Callable[..., str], url: str, model: ServedModel) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"fake": {"limit": {"context": 100000, "output": 1000}}},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"local": provider}}
    files = {".config/opencode/opencode.json": json.dumps(config)}
    assert "It has one file." in run("opencode", "run", "-m", "local/fake", QUESTION, files=files)
    prompts = [str(model.tokenizer.decode(each.request.prompt)) for each in model.scheduler.asked]  # type: ignore[attr-defined]
    assert any("[tool:only.py\n]" in prompt for prompt in prompts)
