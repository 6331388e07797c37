from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import client_of, fake_model
from picompile_runtime.serving.http.app import AppSettings
from picompile_runtime.serving.http.guard import allowed_hosts, is_loopback
from picompile_runtime.serving.http.openapi import OPERATIONS

KEYS = ("first-key", "second-key")
OPEN = ("/", "/health")


def guarded(**settings: object) -> TestClient:
    return client_of(fake_model(), settings=AppSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [operation.path.replace("{model}", "fake") for operation in OPERATIONS])
def test_all_but_the_page_and_health_need_a_key(path: str) -> None:
    client = guarded(keys=KEYS)
    answer = client.get(path)
    assert (answer.status_code == 401) == (path not in OPEN)
    if answer.status_code == 401:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "missing_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key: str) -> None:
    client = guarded(keys=KEYS)
    for header in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key} "}, {"X-Api-Key": key}):
        assert client.get("/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize(
    "value", ["Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key", "Bearer é", "Bearer"]
)
def test_other_keys_do_not(value: str) -> None:
    answer = guarded(keys=KEYS).get("/v1/models", headers={"authorization": value.encode()})
    assert answer.status_code == 401 and answer.json()["error"]["code"] in ("invalid_api_key", "missing_api_key")
    assert "first" not in answer.text


def test_paths_that_there_are_not_need_a_key_as_well() -> None:
    assert guarded(keys=KEYS).get("/nothing").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("localhost:8080", 200), ("127.0.0.1:1", 200), ("[::1]:8080", 200), ("LOCALHOST", 200)),
        *(("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("", 403)),
    ],
)
def test_only_names_of_this_machine_reach_a_local_server(host: str, status: int) -> None:
    client = guarded(hosts=allowed_hosts("127.0.0.1", ()))
    answer = client.get("/health", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"


def test_names_that_are_allowed() -> None:
    assert allowed_hosts("0.0.0.0", ()) is None
    assert allowed_hosts("0.0.0.0", ("me.example",)) == ("localhost", "127.0.0.1", "::1", "me.example")
    assert set(allowed_hosts("localhost", ("me.example",)) or ()) == {"localhost", "127.0.0.1", "::1", "me.example"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_addresses_that_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_other_origins_may_ask_only_if_they_are_named() -> None:
    ask = {"origin": "http://page.example", "access-control-request-method": "POST"}
    closed = guarded().options("/v1/completions", headers=ask)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers

    client = guarded(origins=("http://page.example",), keys=KEYS)
    asked = {**ask, "access-control-request-headers": "authorization,content-type"}
    answer = client.options("/v1/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page.example"
    other = client.options("/v1/completions", headers={**asked, "origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers
    # The page can read why it was refused.
    refused = client.get("/v1/models", headers={"origin": "http://page.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page.example"
