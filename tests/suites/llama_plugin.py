"""A plugin of pytest for llama.cpp's suite: its tests ask llama.cpp's server, and are answered by ours."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_native
import pytest
from results import Results

# These have no /v1 in front there.
_OPENAI_PATHS = ("/chat/completions", "/responses", "/models")


def pytest_configure(config: Any) -> None:
    """Register the table of results, and change how the suite asks."""
    import utils  # type: ignore[import-not-found]  # the suite's

    config.pluginmanager.register(Results(), "results")
    if not os.environ["SUITE_LLAMA_SERVER"]:
        _translate(utils.ServerProcess)
    # It would start every model of llama.cpp's, to fetch it.
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def _translate(server: Any) -> None:
    """Have the suite's `ServerProcess` ask for the paths and the fields that our server has."""
    make_url, request, stream = server.make_url, server.make_request, server.make_stream_request

    def make_url_with_version(self: Any, path: str, host: str | None = None) -> str:
        return str(make_url(self, f"/v1{path}" if path in _OPENAI_PATHS else path, host))

    def make_request(self: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any) -> Any:
        if method == "POST" and path in llama_native.COMPLETION:
            body = llama_native.completion_body(data, self)
            answer = request(self, method, "/v1/completions", body, *rest, **options)
            if answer.status_code == 200:
                answer.body = llama_native.completion_answer(answer.body, data)
            return answer
        if path == llama_native.TEMPLATE:
            answer = request(self, method, "/tokenize", llama_native.template_body(data, self), *rest, **options)
            if answer.status_code == 200:
                answer.body = llama_native.template_answer(answer.body)
            return answer
        return request(self, method, path, with_sampling(self, path, data), *rest, **options)

    def make_stream_request(
        self: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any
    ) -> Iterator[Any]:
        if path not in llama_native.COMPLETION:
            yield from stream(self, method, path, with_sampling(self, path, data), *rest, **options)
            return
        body = llama_native.completion_body(data, self)
        for chunk in stream(self, method, "/v1/completions", body, *rest, **options):
            yield from llama_native.completion_chunks(chunk, data)

    def with_sampling(self: Any, path: str, data: Any) -> Any:
        return {**llama_native.sampling(self), **data} if path.endswith("/chat/completions") else data

    server.make_url, server.make_request = make_url_with_version, make_request
    server.make_stream_request = make_stream_request


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Have the server take the names of models that a test uses: llama.cpp's server takes every name."""
    names = re.findall(r'model="([^"]+)"', inspect.getsource(item.function))
    given = item.callspec.params.get("model") if hasattr(item, "callspec") else None
    os.environ["SUITE_NAMES"] = json.dumps([*names, *([given] if given else [])])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any) -> None:
    """Write the results, and have pytest return 0 if no test failed but those that are expected to."""
    is_expected = session.config.pluginmanager.get_plugin("results").write(Path(os.environ["SUITE_OUT"]))
    session.exitstatus = 0 if is_expected else 1
