"""The server's page for chats, in a browser: questions, answers and what stays in the browser."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright")

from playwright.sync_api import expect

from helpers.chat_page import ask, open_page, say, wait_for_end
from helpers.fake_chat_server import FakeChatServer, Reply, fake_chat_server
from helpers.serving_process import serving

pytestmark = pytest.mark.slow("drives a browser")

SLOW = Reply([f"word{place} " for place in range(1000)], delay_s=0.05)


def open_settings(page: Any) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()


def test_questions_are_sent_and_answers_are_shown(page: Any, chat_server: FakeChatServer) -> None:
    field, send = page.get_by_label("Message"), page.get_by_label("Send")
    expect(send).to_be_disabled()
    field.fill("Who is there?")
    send.click()
    expect(page.locator(".answer .text")).to_have_text("Hello, world.")
    expect(page.locator(".question .bubble")).to_have_text("Who is there?")
    expect(field).to_have_value("")
    messages = [{"role": "user", "content": "Who is there?"}]
    options = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
    assert chat_server.asked == [{"model": "tiny", "messages": messages, **options}]
    # Enter sends, and with shift it begins a line. The second question comes with the first answer.
    wait_for_end(page)
    field.press_sequentially("one")
    field.press("Shift+Enter")
    field.press_sequentially("two")
    height = field.bounding_box()["height"]
    field.press("Enter")
    wait_for_end(page)
    messages += [{"role": "assistant", "content": "Hello, world."}, {"role": "user", "content": "one\ntwo"}]
    assert chat_server.asked[1]["messages"] == messages
    assert field.bounding_box()["height"] < height


def test_reasoning_is_apart_from_the_answer_and_folded(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(["It ", "is."], reasoning="Let me see."), Reply()]
    ask(page, "is it?")
    wait_for_end(page)
    expect(page.locator(".answer .text")).to_have_text("It is.")
    reasoning = page.locator(".answer .reasoning div")
    expect(reasoning).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(reasoning).to_have_text("Let me see.")
    say(page, "and now?")
    expect(page.locator(".answer .reasoning").last).to_be_hidden()


def test_text_appears_while_it_comes(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [SLOW]
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
    assert len(chat_server.asked) == 1
    # A reload keeps what came.
    page.reload()
    expect(text).to_contain_text("word8")
    expect(page.locator(".facts")).to_contain_text("Stopped")


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stop_ends_the_answer_on_the_server_too(page: Any, chat_server: FakeChatServer, way: str) -> None:
    chat_server.replies = [SLOW]
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
    while not chat_server.left:
        page.wait_for_timeout(20)
    assert 3 <= chat_server.left[0] < 1000
    assert text.inner_text() == said
    # What was said counts as said.
    chat_server.replies = [Reply()]
    say(page, "and now?")
    assert chat_server.asked[1]["messages"][1] == {"role": "assistant", "content": said}


def test_answers_and_questions_can_be_replaced(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(("first",)), Reply()]
    say(page, "one")
    page.get_by_label("Answer again").click()
    expect(page.locator(".answer .text")).to_have_text("Hello, world.")
    wait_for_end(page)
    assert chat_server.asked[0] == chat_server.asked[1]
    say(page, "two", "three")
    # An edit can be cancelled. An edited question takes the place of all behind it.
    for key, shown in (("Escape", ["one", "two", "three"]), ("Enter", ["one", "zwei"])):
        page.locator(".question").nth(1).hover()
        page.get_by_label("Edit question").nth(1).click()
        page.get_by_label("Question", exact=True).fill("zwei")
        page.get_by_label("Question", exact=True).press(key)
        wait_for_end(page)
        expect(page.locator(".bubble")).to_have_text(shown)
    assert [message["content"] for message in chat_server.asked[4]["messages"]] == ["one", "Hello, world.", "zwei"]


def test_settings_reach_the_request(page: Any, chat_server: FakeChatServer) -> None:
    open_settings(page)
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"Temperature": 0.7, "Top-p": 0.9, "Top-k": 40, "Min-p": 0.05}
    values |= {"Repetition penalty": 1.1, "Max tokens": 99, "Seed": 7}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_label("Close settings").click()
    say(page, "hello")
    body = chat_server.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {label.lower().replace("-", "_").replace(" ", "_"): value for label, value in values.items()}
    assert wanted.items() <= body.items()
    page.reload()
    open_settings(page)
    expect(page.get_by_label("Temperature")).to_have_value("0.7")
    page.get_by_text("Back to the model’s defaults").click()
    expect(page.get_by_label("Temperature")).to_have_value("")
    # A wrong setting is explained and not sent.
    page.get_by_label("Top-k").press_sequentially("1.5")
    page.keyboard.press("Tab")
    expect(page.locator(".wrong:visible")).to_have_text("A whole number from 0, or nothing.")
    page.mouse.click(5, 5)
    expect(page.locator("#settings")).to_be_hidden()
    say(page, "again")
    assert chat_server.asked[1].keys().isdisjoint(wanted)


def test_one_of_several_models_can_be_chosen(page: Any, chat_server: FakeChatServer, refusals: set[int]) -> None:
    expect(page.locator("#model-name")).to_have_text("tiny")
    expect(page.locator("#model")).to_be_hidden()
    # The page waits until the models are loaded.
    refusals.add(503)
    chat_server.models, chat_server.loading = ("large", "small"), 3
    page.reload()
    expect(page.locator("#notice span")).to_have_text("The model is being loaded …")
    expect(page.locator("#notice")).to_be_hidden()
    assert chat_server.loading < 0
    page.get_by_label("Model").select_option("small")
    say(page, "hello")
    assert chat_server.asked[0]["model"] == "small"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("small")


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (Reply(status=429, error="8 requests wait already"), "8 requests wait already"),
        (Reply(status=502), "The server answered 502 Bad Gateway."),
        (Reply(error="the engine failed"), "The engine failed"),
        (Reply(is_cut=True), "The connection ended before the answer did."),
    ],
    ids=["refused", "no message", "in the stream", "cut off"],
)
def test_an_error_is_one_line_and_can_be_retried(
    page: Any, chat_server: FakeChatServer, refusals: set[int], reply: Reply, line: str
) -> None:
    refusals |= {429, 502}
    chat_server.replies = [reply, Reply(("better",))]
    ask(page, "hello")
    trouble = page.locator(".answer .trouble")
    expect(trouble.locator("span")).to_have_text(line)
    expect(page.locator(".answer .text")).to_have_text("Hello, world" if reply.status == 200 else "")
    trouble.get_by_text("Try again").click()
    expect(page.locator(".answer .text")).to_have_text("better")
    expect(trouble).to_be_hidden()
    assert chat_server.asked[0]["messages"] == chat_server.asked[1]["messages"]


def test_a_question_without_an_answer_is_not_sent_again(
    page: Any, chat_server: FakeChatServer, refusals: set[int]
) -> None:
    refusals.add(400)
    chat_server.replies = [Reply(status=400, error="no"), Reply()]
    ask(page, "first")
    expect(page.locator(".answer .trouble")).to_have_text("No Try again")
    say(page, "second")
    assert chat_server.asked[1]["messages"] == [{"role": "user", "content": "second"}]


def test_a_server_that_is_gone_is_noticed(browser: Any) -> None:
    with ExitStack() as running:
        url = running.enter_context(fake_chat_server()).url
        with open_page(browser, url, {0}) as page:
            expect(page.locator("#model-name")).to_have_text("tiny")
            running.close()
            ask(page, "hello")
            trouble = page.locator(".answer .trouble span")
            expect(trouble).to_have_text("The server does not answer. Is it still running?")


def test_a_key_is_asked_for_and_kept_for_the_session(
    browser: Any, chat_server: FakeChatServer, refusals: set[int]
) -> None:
    refusals.add(401)
    chat_server.key = "sesame"
    with open_page(browser, chat_server.url, refusals) as page:
        field = page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        field.fill("open")
        field.press("Enter")
        expect(page.locator("#key-hint")).to_contain_text("refused this key")
        field.fill("sesame")
        page.get_by_text("Continue").click()
        expect(page.locator("#model-name")).to_have_text("tiny")
        say(page, "hello")
        assert len(chat_server.asked) == 1
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        expect(page.locator("#model-name")).to_have_text("tiny")
        expect(page.locator("#key")).to_be_hidden()
        # Without a key that fits there is an error, and not a second question.
        chat_server.key = "another"
        ask(page, "hello")
        page.get_by_text("Cancel").click()
        expect(page.locator(".answer .trouble span").last).to_have_text("The server asks for an API key.")
        expect(page.locator("#key")).to_be_hidden()


def test_a_new_chat_begins_empty_and_can_be_undone(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [SLOW]
    ask(page, "go on")
    expect(page.locator(".answer .text")).to_contain_text("word1")
    page.get_by_label("New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    assert page.evaluate("localStorage.getItem('picompile.chat')") == "[]"
    while not chat_server.left:
        page.wait_for_timeout(20)
    page.get_by_text("Undo").click()
    expect(page.locator(".answer .text")).to_contain_text("word1")
    expect(page.locator(".facts")).to_contain_text("Stopped")


def test_a_reload_keeps_the_chat_until_it_is_forgotten(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(("It", " is **bold**", "."), shares=(0.07,))]
    say(page, "secret question")
    page.reload()
    expect(page.locator(".bubble")).to_have_text("secret question")
    expect(page.locator(".answer strong")).to_have_text("bold")
    expect(page.locator("#share")).to_have_text("7.0\u00a0%")
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
        say(page, "one", "two")
        assert page.locator(".answer .trouble:visible").all_inner_texts() == []
        facts = page.locator(".facts").last
        for fact in ("12 tokens", "from the cache", "of neurons fired"):
            expect(facts).to_contain_text(fact)
        assert page.locator("#graph path").first.get_attribute("d").count("M") > 5
        said = page.locator(".answer .text").last.inner_text()
        assert said
        # The same request has the same answer.
        page.get_by_label("Answer again").last.click()
        wait_for_end(page)
        assert page.locator(".answer .text").last.inner_text() == said
        ask(page, "x" * 5000)
        expect(page.locator(".trouble span:visible")).to_contain_text("does not fit the model's context")
