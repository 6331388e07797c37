"""Chat templates are programs of strangers: none computes for ever, takes all memory, or leaves a process behind."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.descriptors import descriptors
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import RequestError, Tokenizer
from picompile_runtime.sampling import chat_template

TEXT = byte_level()._tokenizer.to_str()
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]


def children() -> set[int]:
    """The processes that this one has started, in any of its threads."""
    gc.collect()  # those of earlier tests end
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread of an earlier test that ended
            found.update(int(child) for child in (task / "children").read_text().split())
    return found


def only_child(before: set[int]) -> int:
    (child,) = children() - before
    return child


@pytest.mark.slow(
    "waits until a limit is met; one of memory and one of depth are fast", but=("{{ 'a' * 10 ** 10", "{% macro")
)
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 1 s$"),
        ("{{ 7 ** (7 ** 9) }}", "it takes more than 1 s$"),
        ("{{ 'a' * 10 ** 10 }}", "it takes more than 512 MiB of memory$"),
        ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "512 MiB"),
        ("{% for a in range(99999) %}{% for b in range(9) %}0123456789{% endfor %}{% endfor %}", "4194304 characters$"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_templates_that_do_not_end_raise(template: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chat of the same tokenizer is rejected as well, and another tokenizer's is rendered."""
    monkeypatch.setitem(chat_template.LIMITS, "cpu_s", 1)
    before = children()
    tokenizer = Tokenizer(TEXT, {}, template)
    for _ in range(2):
        with pytest.raises(RequestError, match=f"^the model's chat template rejects these messages: .*{says}"):
            tokenizer.encode_chat(HELLO)
    assert Tokenizer(TEXT, {}, PLAIN).encode_chat(HELLO) == byte_level().encode("hello")
    del tokenizer
    gc.collect()
    assert children() <= before


@pytest.mark.slow("starts processes for its chats and waits for their ends")
def test_one_process_renders_all_chats_and_ends_with_the_tokenizer() -> None:
    """If it was killed, it is started anew."""
    before, opened = children(), descriptors()
    tokenizer = Tokenizer(TEXT, {}, PLAIN)
    assert children() <= before  # none before there is a chat
    for number in range(20):
        tokenizer.encode_chat([{"content": "x" * number}])
        if number == 0:
            worker = only_child(before)
    assert only_child(before) == worker
    os.kill(worker, signal.SIGKILL)
    for _ in range(100):
        with contextlib.suppress(RequestError):  # it was killed, and still looked alive
            assert tokenizer.encode_chat(HELLO) == byte_level().encode("hello")
            break
    assert only_child(before) != worker
    del tokenizer
    assert descriptors() <= opened and children() <= before  # those of earlier tests may end meanwhile


def test_a_tokenizer_that_is_closed_starts_another_process() -> None:
    before = children()
    made = Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": "{{ messages[0].content }}"})
    made.close()  # there is none yet
    text = made.encode_chat([{"role": "user", "content": "Hi"}])
    first = only_child(before)
    made.close()
    assert first not in children()
    assert made.encode_chat([{"role": "user", "content": "Hi"}]) == text
    made.close()
    assert children() == before


def test_several_threads_chat_with_one_tokenizer() -> None:
    tokenizer = Tokenizer(TEXT, {}, PLAIN)

    def chat(number: int) -> None:
        for _ in range(20):
            text = f"thread {number}"
            assert tokenizer.decode(tokenizer.encode_chat([{"content": text}])) == text

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(chat, range(4)))


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Tokenizer
tokenizer = Tokenizer(byte_level()._tokenizer.to_str(), {}, "{{ messages[0].content }}")
def chat(text):
    assert tokenizer.decode(tokenizer.encode_chat([{"content": text}])) == text
chat("before")
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        for _ in range(30):
            chat(f"child {number}")
        sys.exit(0)
    children.append(child)
for _ in range(30):
    chat("parent")
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
chat("after")
"""


def test_forked_processes_have_renderers_of_their_own() -> None:
    tests = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, tests], check=True, timeout=60)


def test_messages_of_a_wrong_type_raise() -> None:
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    wrong: list[Any] = [None, 5, "abc", [None], ["a"], [{"a": {1, 2}}], [{"a": object()}], {"role": "user"}, [{1j: 2}]]
    for messages in (*wrong, [itself]):
        with pytest.raises(RequestError, match="messages must be a list of JSON objects, not"):
            Tokenizer(TEXT, {}, PLAIN).encode_chat(messages)


def test_limits_that_the_user_has_set_stay() -> None:
    """Whoever may not raise limits may have lower ones."""
    program = (
        "import resource, sys; import picompile_runtime.limited_worker as worker\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); worker._limit(resource.RLIMIT_AS, 2**41)\n"
        "assert resource.getrlimit(resource.RLIMIT_AS) == (2**40, 2**40)\n"
        "worker._limit(resource.RLIMIT_AS, 2**39)\n"
        "assert resource.getrlimit(resource.RLIMIT_AS) == (2**39, 2**40)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_more_descriptors_than_select_takes() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < 2000:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], 2000), most[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert Tokenizer(TEXT, {}, PLAIN).encode_chat(HELLO)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
