#!/usr/bin/env python3
"""Stand in for the program `llama-server`: take its options, and become a server of ours with what they ask for.

The suite starts it, once for each test, since LLAMA_SERVER_BIN_PATH names it. Further variables name the model
(SUITE_MODEL, a Hugging Face folder), where compiled ones are kept (SUITE_ARTIFACTS), and further names for it
(SUITE_NAMES): llama.cpp's server has one model under every name. With SUITE_LLAMA_SERVER it becomes that program, with
the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_BIN = Path(__file__).parents[2] / ".venv/bin"
_DEFAULT_CONTEXT = 4096


def main() -> None:
    """Become the server."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--port", "--host", "--alias", "--api-key", "--chat-template", "--chat-template-file", "--hf-repo"):
        parser.add_argument(name)
    parser.add_argument("--ctx-size", type=int, default=_DEFAULT_CONTEXT)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--kv-unified", action="store_true")
    options, _ = parser.parse_known_args()
    if "stories260K" not in (options.hf_repo or "") or "infill" in options.hf_repo:
        sys.exit(f"this test needs another model: {options.hf_repo}")
    if program := os.environ.get("SUITE_LLAMA_SERVER"):
        os.execv(program, [program, *_with_model(sys.argv[1:])])
    template = options.chat_template
    if options.chat_template_file:
        template = Path(options.chat_template_file).read_text(encoding="utf-8")
    context = options.ctx_size if options.kv_unified else options.ctx_size // options.parallel
    artifact = _artifact(context, options.parallel, template)
    names = [options.alias or "llama", *json.loads(os.environ.get("SUITE_NAMES", "[]"))]
    command = [_BIN / "python", "-m", "picompile_server", "--host", options.host.split(",")[0]]
    command += ["--port", options.port, "-t", "1"]
    for name in dict.fromkeys(names):
        command += ["--model", f"{name}={artifact}"]
    if options.api_key:
        command += ["--api-key", options.api_key]
    os.execv(command[0], [str(word) for word in command])


def _with_model(arguments: list[str]) -> list[str]:
    """Return the options of llama.cpp's server, with the suite's model in place of the one to be downloaded."""
    left = [word for word in arguments if word != "--offline"]
    for name in ("--hf-repo", "--hf-file"):
        if name in left:
            place = left.index(name)
            left[place : place + 2] = []
    return ["--model", f"{os.environ['SUITE_MODEL']}/llama.gguf", *left]


def _artifact(context: int, slots: int, template: str | None) -> Path:
    """Return the compiled model with so many slots, compiled now if need be; `template` None is the model's own."""
    folder = Path(os.environ["SUITE_ARTIFACTS"])
    digest = hashlib.sha256((template or "").encode()).hexdigest()[:8]
    artifact, model = folder / f"{context}x{slots}-{digest}", Path(os.environ["SUITE_MODEL"])
    if artifact.exists():
        return artifact
    if template not in (None, "chatml"):  # the model's own
        changed = folder / f"model-{digest}"
        shutil.copytree(model, changed, dirs_exist_ok=True)
        file = changed / "tokenizer_config.json"
        described = {**json.loads(file.read_text(encoding="utf-8")), "chat_template": template}
        file.write_text(json.dumps(described), encoding="utf-8")
        model = changed
    command = [_BIN / "picompile", "compile", model, "-o", artifact, "--quant", "f16"]
    command += ["--context", context, "--sequences", slots]
    subprocess.run([str(word) for word in command], check=True)
    return artifact


if __name__ == "__main__":
    main()
