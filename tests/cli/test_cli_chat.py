"""`picompile chat` from a pipe and on a terminal, with a toy model whose answers are known."""

import io
import json
import shutil
import signal
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli
from helpers.terminal import CTRL_C, CTRL_D, CTRL_Z, UP, terminal
from helpers.toys.toy_artifact import build_library, make_toy, write_artifact, write_manifest
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile.cli import main
from picompile.cli.chat_commands import CHAT_COMMANDS
from picompile.cli.chat_history import ChatHistory, history_path

pytestmark = pytest.mark.slow("runs whole chats on pipes and terminals; conversations have fast tests")

VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
X, ESCAPE = (byte_level().encode(letter, special_tokens=False)[0] for letter in "x\x1b")
PERIOD = 7
HINT = "[Ctrl-C again, or Ctrl-D, ends the chat]"


def answer_to(*texts: str) -> str:
    """Return the answer to a chat of such messages: one x for each position up to a multiple of PERIOD."""
    roles = ["u", "a"] * len(texts)
    chat = "".join(f"<{role}>{text}\n" for role, text in zip(roles, texts, strict=False)) + "<a>"
    at = len(byte_level().encode(chat)) - 1
    return "x" * (-at % PERIOD)


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    return build_library(tmp_path_factory.mktemp("chat-library") / "host.so")


@pytest.fixture
def make_chat_model(tmp_path: Path, toy_library: Path) -> Callable[..., Path]:
    """Writes the artifact of a model that says the tokens of a script, by position."""

    def make(script: Mapping[int, int], context: int = 200, chunk: int = 8) -> Path:
        texts = {"tokenizer.json": byte_level()._tokenizer.to_str(), "chat_template.jinja": TEMPLATE}
        toy = make_toy(VOCAB, context, script)
        return write_artifact(tmp_path / "model", toy_library, toy, context=context, chunk=chunk, texts=texts)

    return make


@pytest.fixture
def chat_model(make_chat_model: Callable[..., Path]) -> Path:
    """A model whose answers are those of `answer_to`."""
    return make_chat_model({at: X if at % PERIOD else EOS for at in range(200)})


@pytest.fixture
def talkative_model(make_chat_model: Callable[..., Path]) -> Path:
    """A model that says x for long."""
    context = 20_000
    return make_chat_model(dict.fromkeys(range(context), X), context)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of histories."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


# Without a terminal.


def test_a_pipe_gets_the_answers_and_nothing_else(cli: Cli, chat_model: Path) -> None:
    """A line without an end is a message too."""
    ended = cli("chat", chat_model, "--temp", "0", stdin="one\n\ntwo!")
    first = answer_to("one")
    second = answer_to("one", first, "two!")
    assert first != second and first and second
    assert (ended.code, ended.out, ended.err) == (0, f"{first}\n{second}\n", "")
    for word in ("/quit", "/exit", "/bye"):
        ended = cli("chat", chat_model, stdin=f"{word}\none\n")
        assert (ended.code, ended.out) == (0, "")


def test_messages_of_several_lines_in_a_pipe(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    stdin = f'"""\n/first\n second\n"""\nthird\\\nfourth\n//slash\n"""a"""\n/save {saved}\n'
    assert cli("chat", chat_model, "--temp", "0", stdin=stdin).code == 0
    asked = [message["content"] for message in json.loads(saved.read_text())["messages"] if message["role"] == "user"]
    assert asked == ["/first\n second", "third\nfourth", "/slash", "a"]


def test_one_question_with_an_option(cli: Cli, chat_model: Path) -> None:
    assert cli("chat", chat_model, "-p", "/one", "--temp", "0").out == f"{answer_to('/one')}\n"
    whole = cli("chat", chat_model, "-p", "-", "--temp", "0", stdin="one\ntwo\n")
    assert whole.out == f"{answer_to('one' + chr(10) + 'two')}\n"
    ended = cli("chat", chat_model, "--temp", "0", "-n", "1", "-p", "one")
    assert (ended.code, ended.out) == (0, "x\n")
    assert ended.err == "[cut at 1 tokens; -n N, or /set max-tokens N, allows more]\n"
    silence = next("a" * count for count in range(1, 9) if not answer_to("a" * count))
    ended = cli("chat", chat_model, "--temp", "0", "-p", silence)
    assert (ended.out, ended.err) == ("", "[the model had nothing to say; /regen tries again]\n")
    for prompt in ("", " ", "-"):
        assert_refused(cli("chat", chat_model, "-p", prompt, stdin="\n"), 2, "the message is empty; give one with -p")


def test_a_second_question_reads_only_what_is_new(cli: Cli, chat_model: Path) -> None:
    ended = cli("chat", chat_model, "--temp", "0", stdin="/stats\none\n/stats\ntwo!\n/stats\n/regen\n/stats\n")
    first = answer_to("one")
    # The end token of the first answer was not read, nor is it in the text.
    held = len(byte_level().encode(f"<u>one\n<a>{first}"))
    new = len(byte_level().encode("\n<u>two!\n<a>"))
    before, lines = ended.err.splitlines()[:2], ended.err.splitlines()[2:]
    assert before == ["context   0 of 200 tokens, 200 left", "no answer yet"]
    assert lines[0] == f"context   {held + 1} of 200 tokens, {199 - held} left"
    assert lines[2].startswith(f"answer    {len(first) + 1} tokens at ") and lines[2].endswith("ended by the model")
    assert "% fired, " in lines[3] and lines[3].endswith("% computed")
    assert lines[5].startswith(f"prompt    {new} tokens read at ") and lines[5].endswith(f"/s, {held} reused")
    assert lines[9].startswith("prompt    2 tokens read at ") and lines[9].endswith(f"/s, {held + new - 2} reused")


def test_settings_can_be_changed(cli: Cli, chat_model: Path) -> None:
    stdin = "/set temp 0.5\n/set max-tokens none\n/set seed=3\n/set\n/help\n"
    settings, *helped = cli("chat", chat_model, "-n", "9", stdin=stdin).err.splitlines()[3:]
    assert all(text in settings for text in ("temp 0.5, ", "top-k 40, ", "seed 3, ", "max-tokens none"))
    assert [line.split()[0] for line in helped[: len(CHAT_COMMANDS)]] == list(CHAT_COMMANDS)


def test_an_error_ends_a_chat_from_a_pipe(cli: Cli, chat_model: Path) -> None:
    for line, says in (
        ("/frobnicate", "unknown command /frobnicate; /help lists them, and // begins a message with a slash"),
        ("/set foo 1", "/set knows temp, top-k, top-p, min-p, repetition-penalty, seed, max-tokens, not foo"),
        ("/set temp hot", "temp must be a number, not 'hot'"),
        ("/set max-tokens 0", "max_tokens must be 1 or more, not 0"),
        ("/undo", "the chat has no question yet"),
        ("/save", "/save needs the name of a file"),
        ("/load no/such/file", "no/such/file: no such file"),
        ("/load /dev/null", "/dev/null: not a regular file"),
        ("/save /", "/: is a folder; /save names the file to write"),
        ("/save ~nobody-has-this-name/x", "~nobody-has-this-name"),
        ('"""', 'a message that begins with """ must end with """'),
        ("x\\", "the last line ends with a backslash, and nothing follows"),
        ("x" * 300, "the message is too long: it takes 307 tokens alone, and the context has 200; shorten it"),
    ):
        assert_refused(cli("chat", chat_model, stdin=f"{line}\n"), 2, says)
    ended = cli("chat", chat_model, "--temp", "0", stdin=f"{'a' * 100}\n{'b' * 100}\n")
    assert (ended.code, ended.out) == (2, f"{answer_to('a' * 100)}\n")
    assert ended.err.splitlines()[-1].startswith("error: the chat is full: with this message it would take ")


def test_stdin_that_is_no_text_is_refused(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8"))
    assert main(["chat", str(chat_model)]) == 2


# System prompts, and chats in files.


def chat_in(path: Path) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in json.loads(path.read_text())["messages"]]


def test_the_system_prompt(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    saved = [tmp_path / f"{number}.json" for number in range(3)]
    stdin = (
        f"/system\n/system be terse\n/save {saved[0]}\none\n/system be long\n/system\n/save {saved[1]}\n"
        f'/reset\n/system ""\n/save {saved[2]}\n'
    )
    ended = cli("chat", chat_model, "--temp", "0", "--system", "be nice", stdin=stdin)
    assert {"be nice", "be long", "system prompt removed"} <= set(ended.err.splitlines())
    assert chat_in(saved[0]) == [("system", "be terse")]
    assert chat_in(saved[1])[:2] == [("system", "be long"), ("user", "one")]
    assert chat_in(saved[2]) == []


def test_a_model_without_a_template_is_told_once(cli: Cli, chat_model: Path) -> None:
    (chat_model / "chat_template.jinja").write_text("{{ messages[-1].content }}<a>")
    write_manifest(chat_model, 200, 8)
    ended = cli("chat", chat_model, "--system", "be nice", stdin="/system x\n")
    assert ended.err.splitlines() == [
        "the model's chat template ignores the system prompt",
        "system prompt set, but the model's chat template ignores it",
    ]
    (chat_model / "chat_template.jinja").unlink()
    write_manifest(chat_model, 200, 8)
    ended = cli("chat", chat_model, "--temp", "0", "--system", "be nice", stdin="one\ntwo\n")
    assert ended.code == 0
    assert ended.err == "the model has no chat template: it gets a plain dialogue of User: and Assistant:\n"


def test_a_chat_is_the_same_after_saving_and_loading(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "new" / "a.json", tmp_path / "b c.json"
    stdin = f'"""\nwide 🙂\n\ttab"""\ntwo\n/save {first}\n'
    assert "messages saved in" in cli("chat", chat_model, "--system", "ß", stdin=stdin).err
    assert [role for role, _ in chat_in(first)] == ["system", "user", "assistant", "user", "assistant"]
    assert chat_in(first)[:2] == [("system", "ß"), ("user", "wide 🙂\n\ttab")]
    assert cli("chat", chat_model, "--load", first, stdin=f"/save {second}\n").code == 0
    assert second.read_bytes() == first.read_bytes()
    ended = cli("chat", chat_model, stdin=f"/load {first}\n/undo\n/save! {second}\n")
    assert ended.err.startswith(f"5 messages of {first}: ") and "took back the question 'two'" in ended.err
    assert chat_in(second) == chat_in(first)[:3]
    # It may end with a question.
    second.write_text('[{"role": "user", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]}]')
    ended = cli("chat", chat_model, "--temp", "0", stdin=f"/load {second}\n/regen\n")
    assert ended.err.endswith("; /regen answers the last one\n")
    assert ended.out == f"{answer_to('one')}\n"


def test_saving_overwrites_nothing_unasked_and_only_chats(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    chat, other = tmp_path / "chat.json", tmp_path / "other.txt"
    other.write_text("mine")
    assert cli("chat", chat_model, stdin=f"/save {chat}\n").code == 0
    before = chat.read_bytes()
    ended = cli("chat", chat_model, stdin=f"hello\n/save {chat}\n")
    assert (ended.code, chat.read_bytes()) == (2, before)
    assert f"error: {chat}: exists; /save! {chat} overwrites a chat\n" in ended.err
    assert cli("chat", chat_model, stdin=f"hello\n/save! {chat}\n").code == 0
    assert chat_in(chat)[0] == ("user", "hello")
    for command in ("/save", "/save!"):
        assert cli("chat", chat_model, stdin=f"{command} {other}\n").code == 2
    assert other.read_text() == "mine"


def test_files_that_are_no_chats(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    path, question = tmp_path / "chat.json", '{"role": "user", "content": "x"}'
    for content, says in (
        ("{", "not JSON"),
        ("5", "no chat; it must have a list of messages"),
        ('{"messages": 5}', "no chat; it must have a list of messages"),
        (f'[{question}, {{"content": "x"}}]', "message 2: must be an object with role and content"),
        ('[{"role": "tool", "content": "x"}]', "message 1: a chat here has the roles system, user, assistant, not "),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "message 1: its content must be a text"),
        ('[{"role": "user", "content": "\\ud83d"}]', "not valid Unicode"),
        (f'[{question}, {{"role": "developer", "content": "x"}}]', "only the first message of a chat can be a system"),
    ):
        path.write_text(content)
        assert_refused(cli("chat", chat_model, "--load", path), 2, says)


# On a terminal.


def test_a_chat_on_a_terminal(chat_model: Path, state: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.wait_for("toy, a context of 200 tokens. /help lists the commands, Ctrl-D ends.")
        shown.enter("one")
        shown.wait_for(f"one\n{answer_to('one')}\n\n")
        shown.type('"""\r')
        shown.enter("two", ". ")
        shown.enter('three"""', ". ")
        shown.enter("four\\")
        shown.enter("你好 👩‍👩‍👧", ". ")
        shown.enter(f"/save {saved}")
        shown.wait_for("6 messages saved in")
        assert shown.end() == 0
        assert shown.echoes()
    asked = [text for role, text in chat_in(saved) if role == "user"]
    assert asked == ["one", "two\nthree", "four\n你好 👩‍👩‍👧"]
    assert "\x1b[2m" not in shown.raw  # the test's NO_COLOR


def test_the_history_is_kept_for_the_next_chat(chat_model: Path, state: Path, tmp_path: Path) -> None:
    """Commands are completed by the tabulator, where a line begins with them."""
    pytest.importorskip("readline")
    history, saved = state / "picompile" / "chat_history", tmp_path / "chat.json"
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.enter('"""a\\n')
        shown.enter('b"""', ". ")
        shown.enter("/sta\t")
        shown.enter("/stats")
        shown.enter("/quit")
        assert shown.wait() == 0
    assert history.read_text() == '"""a\\\\n\\nb"""\n/stats\n/quit\n'
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.enter(UP + UP)
        shown.wait_for("no answer yet")
        shown.enter(UP * 4)
        shown.enter("one /sta\t")
        shown.enter(f"/save {saved}")
        assert shown.end() == 0
    assert [text for role, text in chat_in(saved) if role == "user"] == ["a\\n\nb", "one /sta"]


def test_a_history_that_cannot_be_kept_is_no_reason_to_end(chat_model: Path, state: Path) -> None:
    pytest.importorskip("readline")
    state.write_text("a file, not a folder")
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.wait_for(f"the history of what is typed cannot be kept in {state}")
        shown.enter("one")
        shown.wait_for(f"{answer_to('one')}\n")
        assert shown.end() == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(talkative_model: Path, state: Path, tmp_path: Path) -> None:
    with terminal("chat", talkative_model, "--temp", "0") as shown:
        shown.enter("one")
        shown.wait_for("x" * 50)
        assert not shown.echoes()
        shown.type(CTRL_C)
        shown.wait_for("[stopped]")
        shown.enter("/stats")
        shown.wait_for(", stopped")
        shown.enter(f"/save {tmp_path / 'chat.json'}")
        shown.wait_for("2 messages saved")
        shown.enter("two")
        shown.wait_for("x" * 50)
        shown.type(CTRL_C)
        shown.wait_for("[stopped]")
        assert shown.end() == 0
        assert shown.echoes()
    assert "Traceback" not in shown.shown and "error" not in shown.shown
    (_, question), (_, answer) = chat_in(tmp_path / "chat.json")
    assert question == "one" and len(answer) >= 50 and set(answer) == {"x"}


def test_ctrl_c_before_an_answer_changes_nothing(
    make_chat_model: Callable[..., Path], state: Path, tmp_path: Path
) -> None:
    model = make_chat_model({}, 60_000, chunk=1)
    question = tmp_path / "question.json"
    question.write_text(json.dumps([{"role": "user", "content": "long " * 11_000}]))
    with terminal("chat", model, "--temp", "0", "--load", question) as shown:
        shown.enter("/regen")
        shown.wait_for("reading: ")
        shown.type(CTRL_C)
        shown.wait_for("[stopped before the answer began; the chat is as it was before]")
        shown.enter("/undo")
        shown.wait_for("took back the question 'long long")
        assert shown.end() == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_ends(chat_model: Path, state: Path) -> None:
    """It leaves a message of several lines too."""
    pytest.importorskip("readline")
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.enter('"""')
        shown.wait_for_prompt(". ")
        shown.press(CTRL_C)
        shown.wait_for(HINT)
        for text in ("not this", "nor this"):
            shown.wait_for_prompt()
            shown.type(text)
            shown.wait_for(text)
            shown.press(CTRL_C)
            shown.wait_for(HINT)
        shown.wait_for_prompt()
        shown.press(CTRL_C)
        assert shown.wait() == 0
    assert "Traceback" not in shown.shown and "x" not in shown.shown.partition(HINT)[2]


def test_a_paste_of_several_lines_is_one_message(chat_model: Path, state: Path, tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    if "GNU" not in readline.__doc__:
        pytest.skip("only GNU readline knows pastes")
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.wait_for_prompt()
        if "\x1b[?2004h" not in shown.raw:
            pytest.skip("this readline asks the terminal for no brackets")
        shown.type("\x1b[200~def f(x): \\\r    return x\r\x1b[201~what is this?\r")
        shown.enter(f"/save {tmp_path / 'chat.json'}")
        shown.wait_for("2 messages saved")
        assert shown.end() == 0
    assert chat_in(tmp_path / "chat.json")[0] == ("user", "def f(x): \\\n    return x\nwhat is this?")


def test_errors_on_a_terminal_cost_nothing(chat_model: Path, state: Path) -> None:
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.enter("/frobnicate")
        shown.wait_for("error: unknown command /frobnicate")
        shown.enter("a" * 100)
        shown.enter("b" * 100)
        shown.wait_for("error: the chat is full: with this message it would take ")
        shown.enter("/undo")
        shown.enter("b" * 100)
        shown.wait_for(f"{answer_to('b' * 100)}\n")
        shown.enter("/reset")
        shown.enter('"""')
        shown.wait_for_prompt(". ")
        shown.type(CTRL_D)
        shown.wait_for('error: a message that begins with """ must end with """')
        assert shown.end() == 0


def test_an_answer_that_fills_the_context_says_so(
    cli: Cli, make_chat_model: Callable[..., Path], state: Path, tmp_path: Path
) -> None:
    model = make_chat_model(dict.fromkeys(range(60), X), 60)
    ended = cli("chat", model, "--temp", "0", stdin="/set max-tokens 44\none\n")
    assert "[the chat is nearly full: 6 of 60 tokens are left]" in ended.err
    # Answers go to a file, the rest to the terminal.
    with terminal("chat", model, "--temp", "0", stdout=tmp_path / "answers") as shown:
        shown.enter("one")
        shown.wait_for("[the context of 60 tokens is full; /undo takes the answer back, /reset starts anew]")
        assert shown.end() == 0
    assert set((tmp_path / "answers").read_text()) == {"x", "\n"}


def test_codes_that_a_model_writes_do_not_reach_a_terminal(
    cli: Cli, make_chat_model: Callable[..., Path], state: Path
) -> None:
    script = dict.fromkeys(range(60), X) | dict.fromkeys(range(0, 60, 2), ESCAPE) | {50: EOS, 51: EOS}
    model = make_chat_model(script, 60)
    with terminal("chat", model, "--temp", "0", "-p", "one") as shown:
        assert shown.wait() == 0
    _, _, answer = shown.raw.rpartition("\x1b[?25h")  # behind the bar of loading
    assert "\x1b" not in answer and "x\N{REPLACEMENT CHARACTER}x" in answer
    assert "x\x1bx" in cli("chat", model, "--temp", "0", "-p", "one").out


@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_a_signal_ends_the_chat_and_gives_the_terminal_back(talkative_model: Path, state: Path, when: str) -> None:
    with terminal("chat", talkative_model, "--temp", "0") as shown:
        if when == "at the prompt":
            shown.wait_for_prompt()
            shown.wait_until_idle()
        else:
            shown.enter("one")
            shown.wait_for("x" * 50)
        shown.process.send_signal(signal.SIGTERM)
        assert shown.wait() == 128 + signal.SIGTERM
        assert shown.echoes()
    assert "Traceback" not in shown.shown


def test_a_line_goes_on_after_ctrl_z(chat_model: Path, state: Path) -> None:
    """Nothing stops here, since no shell could continue it; but the line is begun anew, as after a stop."""
    pytest.importorskip("readline")
    with terminal("chat", chat_model, "--temp", "0") as shown:
        shown.wait_for_prompt()
        shown.type("before ")
        shown.wait_for("before ")
        shown.press(CTRL_Z)
        shown.wait_for("\n> before ")
        shown.type("after\r")
        shown.wait_for(f"{answer_to('before after')}\n")
        assert shown.end() == 0


def test_colors_are_for_terminals_that_have_them(chat_model: Path, state: Path) -> None:
    for variables, expected in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "", "TERM": "dumb"}, False)):
        with terminal("chat", chat_model, environment=variables) as shown:
            assert shown.end() == 0
        assert ("\x1b[2m" in shown.raw) is expected


def test_the_history_file_is_cut_when_it_has_grown_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "history"
    history = ChatHistory(path)
    assert history.load() == []
    entries = [f"{number}\\n\n\\" for number in range(2000)]
    for entry in entries:
        history.append(entry)
    assert history.load() == entries[-1000:]
    assert len(path.read_text().splitlines()) == 2000
    history.append("one more")
    assert history.load() == [*entries[-999:], "one more"]
    assert len(path.read_text().splitlines()) == 1000
    assert [file.name for file in path.parent.iterdir()] == ["history"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("HOME", "/home/someone")
    for state, expected in (
        ("/state", "/state"),
        ("", "/home/someone/.local/state"),
        ("x", "/home/someone/.local/state"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert history_path() == Path(expected) / "picompile" / "chat_history"
