from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from playwright.sync_api import expect

from helpers.chat_page import ask, chromium, open_page, wait_for_end
from helpers.fake_chat_server import FakeChatServer, Reply, fake_chat_server
from helpers.serving_process import serving

SLOW = Reply([f"word{place} " for place in range(1000)], delay_s=0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def server() -> Iterator[FakeChatServer]:
    with fake_chat_server() as started:
        yield started


@pytest.fixture
def refusals() -> set[int]:
    return set()


@pytest.fixture
def page(browser: Any, server: FakeChatServer, refusals: set[int]) -> Iterator[Any]:
    with open_page(browser, server.url, refusals) as opened:
        yield opened


def stored(page: Any, name: str) -> Any:
    return page.evaluate("(name) => JSON.parse(localStorage.getItem(`picompile.${name}`))", name)


def open_settings(page: Any) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_click_sends_the_question_and_the_answer_is_shown(page: Any, server: FakeChatServer) -> None:
    expect(page.get_by_label("Send")).to_be_disabled()
    page.get_by_label("Message").fill("Who is there?")
    page.get_by_label("Send").click()
    expect(page.locator(".answer .text")).to_have_text("Hello, world.")
    expect(page.locator(".question .bubble")).to_have_text("Who is there?")
    expect(page.get_by_label("Message")).to_have_value("")
    assert server.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Who is there?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,
        }
    ]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_enter_sends_and_shift_enter_begins_a_line(page: Any, server: FakeChatServer) -> None:
    field = page.get_by_label("Message")
    field.press_sequentially("one")
    field.press("Shift+Enter")
    field.press_sequentially("two")
    height = field.bounding_box()["height"]
    field.press("Enter")
    expect(page.locator(".answer .text")).to_have_text("Hello, world.")
    assert server.asked[0]["messages"][0]["content"] == "one\ntwo"
    assert field.bounding_box()["height"] < height


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_the_second_question_comes_with_the_first_answer(page: Any, server: FakeChatServer) -> None:
    ask(page, "first")
    wait_for_end(page)
    ask(page, "second")
    wait_for_end(page)
    assert [(message["role"], message["content"]) for message in server.asked[1]["messages"]] == [
        ("user", "first"),
        ("assistant", "Hello, world."),
        ("user", "second"),
    ]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_text_appears_while_it_comes(page: Any, server: FakeChatServer) -> None:
    server.replies = [SLOW]
    ask(page, "go on")
    text = page.locator(".answer .text")
    expect(text).to_contain_text("word0")
    first = text.inner_text()
    expect(text).to_contain_text("word4")
    assert text.inner_text().startswith(first.rstrip())
    assert "word999" not in text.inner_text()
    # Enter neither sends the next question nor stops the answer.
    ask(page, "next")
    expect(text).to_contain_text("word8")
    expect(page.get_by_label("Message")).to_have_value("next")
    page.get_by_label("Stop").click()
    assert len(server.asked) == 1


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stop_ends_the_answer_on_the_server_too(page: Any, server: FakeChatServer, way: str) -> None:
    server.replies = [SLOW]
    ask(page, "go on")
    text = page.locator(".answer .text")
    expect(text).to_contain_text("word2")
    if way == "click":
        page.get_by_label("Stop").click()
    else:
        page.keyboard.press(way)
    expect(page.locator(".facts")).to_contain_text("Stopped")
    expect(page.get_by_label("Send")).to_be_visible()
    said = text.inner_text()
    while not server.left:
        page.wait_for_timeout(20)
    assert 3 <= server.left[0] < 1000
    assert text.inner_text() == said
    # What was said counts as said.
    server.replies = [Reply()]
    ask(page, "and now?")
    wait_for_end(page)
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": said}


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_question_without_an_answer_is_not_sent_again(page: Any, server: FakeChatServer, refusals: set[int]) -> None:
    refusals.add(400)
    server.replies = [Reply(status=400, error="no"), Reply()]
    ask(page, "first")
    expect(page.locator(".answer .trouble")).to_have_text("No Try again")
    ask(page, "second")
    wait_for_end(page)
    assert server.asked[1]["messages"] == [{"role": "user", "content": "second"}]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_the_share_of_neurons_is_shown_and_explained(page: Any, server: FakeChatServer) -> None:
    expect(page.locator("#meter")).to_be_hidden()
    ask(page, "how many?")
    wait_for_end(page)
    expect(page.locator("#share")).to_have_text("10.0\u00a0%")
    expect(page.locator("#share-unit")).to_have_text("of neurons fired")
    # The first token comes with the prompt, the last one with the mean.
    assert page.locator("#graph path").first.get_attribute("d").count("M") == 2
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.locator(".explain").hover()
    expect(tip).to_contain_text("Each bar is one token")
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    # Without a pointer that hovers: a tap or Enter opens it, Escape closes it.
    page.locator(".explain").focus()
    page.keyboard.press("Enter")
    expect(tip).to_be_visible()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_bar_says_its_text(page: Any, server: FakeChatServer) -> None:
    # On a GPU, the share is known once in some steps.
    server.replies = [Reply(("One", " two", " three", " four", " five", "."), shares=(None, 0.08, None, 0.12))]
    ask(page, "how many?")
    wait_for_end(page)
    box = page.locator("#graph").bounding_box()
    for bar, share, text in ((1, "12.0\u00a0%", "for “four five”"), (2, "8.0\u00a0%", "for “two three”")):
        page.mouse.move(box["x"] + box["width"] - 3 * bar + 1, box["y"] + 10)
        expect(page.locator("#share")).to_have_text(share)
        expect(page.locator("#share-unit")).to_have_text(text)
    page.mouse.move(5, 5)
    expect(page.locator("#share")).to_have_text("10.0\u00a0%")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_stopped_answer_has_the_mean_of_its_bars(page: Any, server: FakeChatServer) -> None:
    server.replies = [replace(SLOW, shares=(0.1, 0.1, 0.4))]
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("word4")
    page.keyboard.press("Escape")
    wait_for_end(page)
    shares = [share for share, _ in stored(page, "chat")[-1]["fires"]]
    assert shares[:4] == [0.1, 0.1, 0.4, 0.1]
    expect(page.locator("#share")).to_have_text(f"{100 * sum(shares) / len(shares):.1f}\u00a0%")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_only_the_last_bars_are_kept(page: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(["a "] * 302, shares=[0.1] * 100 + [0.2] * 200)]
    ask(page, "much")
    wait_for_end(page)
    assert [share for share, _ in stored(page, "chat")[-1]["fires"]] == [0.2] * 200
    # The number is over all tokens.
    expect(page.locator("#share")).to_have_text("16.6\u00a0%")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_model_without_shares_has_only_its_speed(page: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(shares=None)]
    ask(page, "how many?")
    wait_for_end(page)
    expect(page.locator("#speed")).to_contain_text("tokens/s")
    expect(page.locator(".explain")).to_be_hidden()
    expect(page.locator("#graph")).to_be_hidden()
    expect(page.locator(".facts")).not_to_contain_text("neurons")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_figures_stand_under_an_answer(page: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(prompt_tokens=402, cached_tokens=371, finish="length")]
    ask(page, "how many?")
    wait_for_end(page)
    facts = page.locator(".facts")
    for fact in ("4 tokens", "tokens/s", "10.0\u00a0% of neurons fired", "prompt of 402 tokens, 371 from the cache"):
        expect(facts).to_contain_text(fact)
    expect(facts).to_contain_text("Cut off at the limit of tokens")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_regenerate_replaces_the_last_answer(page: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(("first",)), Reply(("second",))]
    ask(page, "say")
    wait_for_end(page)
    page.get_by_label("Answer again").click()
    expect(page.locator(".answer .text")).to_have_text("second")
    assert server.asked[0] == server.asked[1]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_an_edited_question_takes_the_place_of_all_behind_it(page: Any, server: FakeChatServer) -> None:
    for question in ("one", "two", "three"):
        ask(page, question)
        wait_for_end(page)
    page.locator(".question").nth(1).hover()
    page.get_by_label("Edit question").nth(1).click()
    page.get_by_label("Question", exact=True).fill("zwei")
    page.get_by_label("Question", exact=True).press("Enter")
    wait_for_end(page)
    assert [message["content"] for message in server.asked[3]["messages"]] == ["one", "Hello, world.", "zwei"]
    expect(page.locator(".bubble")).to_have_text(["one", "zwei"])


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_an_edit_can_be_cancelled(page: Any, server: FakeChatServer) -> None:
    ask(page, "one")
    wait_for_end(page)
    page.locator(".question").hover()
    page.get_by_label("Edit question").click()
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("one")
    assert len(server.asked) == 1


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_settings_reach_the_request(page: Any, server: FakeChatServer) -> None:
    open_settings(page)
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"Temperature": "0.7", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05"}
    values |= {"Repetition penalty": "1.1", "Max tokens": "99", "Seed": "7"}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Close settings").click()
    ask(page, "hello")
    wait_for_end(page)
    body = server.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    assert wanted.items() <= body.items()
    assert {"max_tokens": 99, "seed": 7}.items() <= body.items()
    page.reload()
    open_settings(page)
    expect(page.get_by_label("Temperature")).to_have_value("0.7")
    page.get_by_text("Back to the model’s defaults").click()
    expect(page.get_by_label("Temperature")).to_have_value("")
    page.keyboard.press("Escape")
    ask(page, "again")
    wait_for_end(page)
    assert server.asked[1].keys().isdisjoint(wanted)


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_wrong_setting_is_explained_and_not_sent(page: Any, server: FakeChatServer) -> None:
    open_settings(page)
    page.get_by_label("Top-k").press_sequentially("1.5")
    page.keyboard.press("Tab")
    expect(page.locator(".wrong:visible")).to_have_text("A whole number from 0, or nothing.")
    page.mouse.click(5, 5)
    expect(page.locator("#settings")).to_be_hidden()
    ask(page, "hello")
    wait_for_end(page)
    assert "top_k" not in server.asked[0]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_one_of_several_models_can_be_chosen(page: Any, server: FakeChatServer) -> None:
    expect(page.locator("#model-name")).to_have_text("tiny")
    expect(page.locator("#model")).to_be_hidden()
    server.models = ("large", "small")
    page.reload()
    page.get_by_label("Model").select_option("small")
    ask(page, "hello")
    wait_for_end(page)
    assert server.asked[0]["model"] == "small"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("small")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (
            Reply(status=429, error="8 requests wait already"),
            "8 requests wait already",
        ),
        (Reply(status=502), "The server answered 502 Bad Gateway."),
        (Reply(error="the engine failed"), "The engine failed"),
        (Reply(is_cut=True), "The connection ended before the answer did."),
    ],
    ids=["refused", "no message", "in the stream", "cut off"],
)
def test_an_error_is_one_line_and_can_be_retried(
    page: Any, server: FakeChatServer, refusals: set[int], reply: Reply, line: str
) -> None:
    refusals |= {429, 502}
    server.replies = [reply, Reply(("better",))]
    ask(page, "hello")
    trouble = page.locator(".answer .trouble")
    expect(trouble.locator("span")).to_have_text(line)
    expect(page.locator(".answer .text")).to_have_text("Hello, world" if reply.status == 200 else "")
    trouble.get_by_text("Try again").click()
    expect(page.locator(".answer .text")).to_have_text("better")
    expect(trouble).to_be_hidden()
    assert server.asked[0]["messages"] == server.asked[1]["messages"]


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_server_that_is_gone_is_noticed(browser: Any) -> None:
    with fake_chat_server() as server, open_page(browser, server.url, {0}) as page:
        expect(page.locator("#model-name")).to_have_text("tiny")
        server.stop()
        ask(page, "hello")
        expect(page.locator(".answer .trouble span")).to_have_text("The server does not answer. Is it still running?")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_the_page_waits_until_the_model_is_loaded(page: Any, server: FakeChatServer, refusals: set[int]) -> None:
    refusals.add(503)
    server.loading = 3
    page.reload()
    expect(page.locator("#notice span")).to_have_text("The model is being loaded …")
    expect(page.locator("#notice")).to_be_hidden()
    assert server.loading < 0


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_key_is_asked_for_and_kept_for_the_session(browser: Any, server: FakeChatServer, refusals: set[int]) -> None:
    refusals.add(401)
    server.key = "sesame"
    with open_page(browser, server.url, refusals) as page:
        field = page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        field.fill("open")
        field.press("Enter")
        expect(page.locator("#key-hint")).to_contain_text("refused this key")
        field.fill("sesame")
        page.get_by_text("Continue").click()
        expect(page.locator("#model-name")).to_have_text("tiny")
        ask(page, "hello")
        wait_for_end(page)
        assert len(server.asked) == 1
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        expect(page.locator("#model-name")).to_have_text("tiny")
        expect(page.locator("#key")).to_be_hidden()


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_without_a_key_there_is_an_error_and_not_a_second_question(
    page: Any, server: FakeChatServer, refusals: set[int]
) -> None:
    refusals.add(401)
    expect(page.locator("#model-name")).to_have_text("tiny")
    server.key = "sesame"
    ask(page, "hello")
    page.get_by_text("Cancel").click()
    expect(page.locator(".answer .trouble span")).to_have_text("The server asks for an API key.")
    expect(page.locator("#key")).to_be_hidden()


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_reload_keeps_the_chat(page: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(("It", " is **bold**", "."), shares=(0.07,))]
    ask(page, "how?")
    wait_for_end(page)
    page.reload()
    expect(page.locator(".bubble")).to_have_text("how?")
    expect(page.locator(".answer strong")).to_have_text("bold")
    expect(page.locator("#share")).to_have_text("7.0\u00a0%")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_reload_while_text_comes_keeps_what_came(page: Any, server: FakeChatServer) -> None:
    server.replies = [SLOW]
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("word3")
    page.reload()
    expect(page.locator(".answer .text")).to_contain_text("word3")
    expect(page.locator(".facts")).to_contain_text("Stopped")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_a_new_chat_begins_empty_and_can_be_undone(page: Any, server: FakeChatServer) -> None:
    server.replies = [SLOW]
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("word1")
    page.get_by_label("New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert stored(page, "chat") == []
    while not server.left:
        page.wait_for_timeout(20)
    page.get_by_text("Undo").click()
    expect(page.locator(".answer .text")).to_contain_text("word1")
    expect(page.locator(".facts")).to_contain_text("Stopped")


@pytest.mark.slow("drives a browser; a chat with the real server is fast")
def test_forget_leaves_nothing_in_the_browser(page: Any) -> None:
    ask(page, "secret question")
    wait_for_end(page)
    open_settings(page)
    page.get_by_label("System prompt").fill("secret prompt")
    page.get_by_text("Forget everything").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_a_chat_with_the_real_server(browser: Any, serving_artifact: Path) -> None:
    arguments = ("--model", f"tiny={serving_artifact}", "--api-key", "sesame")
    with serving(*arguments) as real, open_page(browser, f"{real.url}/", {400, 401}) as page:
        page.get_by_label("API key", exact=True).fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model-name")).to_have_text("tiny")
        open_settings(page)
        page.get_by_label("Max tokens").fill("12")
        page.get_by_label("Seed").fill("1")
        page.get_by_label("Close settings").click()
        for question in ("one", "two"):
            ask(page, question)
            wait_for_end(page)
            assert page.locator(".answer .trouble:visible").all_inner_texts() == []
        facts = page.locator(".facts").last
        expect(facts).to_contain_text("12 tokens")
        expect(facts).to_contain_text("from the cache")
        expect(facts).to_contain_text("of neurons fired")
        assert page.locator("#graph path").first.get_attribute("d").count("M") > 5
        said = page.locator(".answer .text").last.inner_text()
        assert said
        # The same request has the same answer.
        page.get_by_label("Answer again").last.click()
        wait_for_end(page)
        assert page.locator(".answer .text").last.inner_text() == said
        ask(page, "x" * 5000)
        expect(page.locator(".trouble span:visible")).to_contain_text("does not fit the model's context")
