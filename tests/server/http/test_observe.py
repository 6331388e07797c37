from __future__ import annotations

import base64
import hashlib
import re

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, SLOTS, FakeScheduler, client_of, fake_model, made, text_tokens
from helpers.toys.toy_tokenizers import EOS, metaspace


def samples(client: TestClient) -> dict[tuple[str, ...], float]:
    """The value of each sample, by its name and its labels' values."""
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_nothing_is_served_while_models_load() -> None:
    first, second = fake_model(name="a"), fake_model(name="b")
    client = client_of(names=("a", "b"))
    models = client.app.state.models  # type: ignore[attr-defined]
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
    assert client.get("/").status_code == 200
    for path in ("/v1/models", "/slots", "/v1/models/a"):
        assert client.get(path).status_code == 503
        assert client.get(path).json()["error"]["code"] == "loading"
    assert client.get("/metrics").status_code == 200

    models.add(first)
    assert client.get("/health").status_code == 503
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a"]
    body = {"prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json={**body, "model": "a"}).status_code == 200
    assert client.post("/v1/completions", json={**body, "model": "b"}).status_code == 503

    models.add(second)
    assert client.get("/health").json() == {"status": "ok"}
    models.is_draining = True
    assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "draining"})


def test_several_models() -> None:
    client = client_of(fake_model("one", "a"), fake_model("two", "b/c"))
    for name, text in (("a", "one"), ("b/c", "two"), (None, "one")):
        answer = made(client, "/v1/completions", prompt="x", model=name)
        assert answer["choices"][0]["text"] == text and answer["model"] == (name or "a")
        assert client.get(f"/v1/models/{name or 'a'}").json()["id"] == (name or "a")
    assert [slot["model"] for slot in client.get("/slots").json()] == ["a"] * SLOTS + ["b/c"] * SLOTS


def test_slots(client: TestClient) -> None:
    slot = {"model": "fake", "n_ctx": CONTEXT}
    busy = {"is_processing": True, "state": "decoding", "n_tokens": 4, "id_task": 1}
    idle = {"is_processing": False, "state": "idle", "n_tokens": 0, "id_task": None}
    assert client.get("/slots").json() == [{"id": 0, **slot, **busy}, {"id": 1, **slot, **idle}]


def test_metrics_count_answers_and_tokens(client: TestClient, scheduler: FakeScheduler) -> None:
    tokens = len(text_tokens("Hello, world.")) + 1
    for fields in ({"n": 2}, {"max_tokens": 1}, {"stop": "wor"}):
        client.post("/v1/completions", json={"prompt": "x", **fields})
    scheduler.failure = "broken"
    client.post("/v1/completions", json={"prompt": "x"})
    client.get("/v1/models/nothing")
    client.get("/nothing")
    found = samples(client)
    outcomes = [found["picompile_answers_total", "fake", name] for name in ("eos", "max_tokens", "stop", "error")]
    assert outcomes == [2, 1, 1, 1]
    assert found["picompile_time_to_first_token_seconds_count", "fake"] == 4
    stopped = len(text_tokens("Hello, wor"))
    assert found["picompile_time_between_tokens_seconds_count", "fake"] == 2 * (tokens - 1) + stopped - 1
    places = [("/v1/completions", "200"), ("/v1/completions", "500"), ("other", "404")]
    assert [found[("picompile_http_responses_total", *place)] for place in places] == [3, 1, 2]
    assert found["picompile_slots", "fake"] == SLOTS and found["picompile_kv_tokens", "fake"] == 11
    assert found["picompile_generated_tokens_total", "fake"] == 7
    assert [found[f"picompile_{kind}_tokens_total", "fake"] for kind in ("drafted", "accepted")] == [6, 5]
    # What is not known is left out.
    assert ("picompile_fired_ratio", "fake") not in found


def test_the_page_runs_its_own_script_and_no_other(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_tokenize_and_detokenize(client: TestClient) -> None:
    ids = text_tokens("né!")
    tokens = made(client, "/tokenize", content="né!")
    assert tokens == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    tokens = made(client, "/tokenize", prompt="né!", return_token_strs=True)
    assert tokens["token_strs"] == ["n", "\\xc3", "\\xa9", "!"]
    pieces = made(client, "/tokenize", content="né", with_pieces=True)["tokens"]
    assert pieces == [{"id": one, "piece": piece} for one, piece in zip(ids, ("n", [0xC3], [0xA9]), strict=False)]
    assert made(client, "/detokenize", tokens=ids) == {"content": "né!", "prompt": "né!"}
    assert made(client, "/detokenize", tokens=[])["content"] == ""
    assert made(client, "/detokenize", tokens=[EOS, *text_tokens("né"), EOS])["content"] == "<eos>né<eos>"
    chat = made(client, "/tokenize", messages=[{"role": "user", "content": "Hi"}])
    assert made(client, "/detokenize", tokens=chat["tokens"])["content"] == "User: Hi\n\nAssistant:"
    assert client.post("/tokenize", json={"content": "a", "prompt": "b"}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    # Longer than the context is no error here, but it has an end.
    assert made(client, "/tokenize", content="x" * 5000)["count"] == 5000
    assert client.post("/tokenize", json={"content": "x" * 300_000}).status_code == 400


def test_special_tokens_are_added_as_each_server_does() -> None:
    client = client_of(fake_model(tokenizer=metaspace()))
    with_bos = made(client, "/tokenize", prompt="ab")["tokens"]
    assert with_bos[0] == 1
    for body in ({"content": "ab"}, {"prompt": "ab", "add_special_tokens": False}):
        assert made(client, "/tokenize", **body)["tokens"] == with_bos[1:]
    assert made(client, "/tokenize", content="ab", add_special=True)["tokens"] == with_bos
