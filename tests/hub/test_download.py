"""Downloads, from a server that speaks the hub's API."""

import shutil
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.fake_hub import FakeHub
from picompile.errors import DoesNotFitError, UsageError
from picompile.hub import Download, ModelName, download, download_config, remove_downloads
from picompile.progress import NoProgress

MEMORY = 64 * 10**9
CHECKPOINT = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": b"w" * 5000, "x.bin": b"no"}


class Told(NoProgress):
    """Keeps what the user is told, and the bytes that were counted by step."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counted = Counter[str]()

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        def advance(count: int) -> None:
            self.counted[title] += count

        yield advance

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants, file_download

    with FakeHub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        yield found


def load(name: str, told: Told | None = None, **facts: str) -> Download:
    return download(ModelName(name, **facts), told or Told(), MEMORY)


def test_only_what_is_needed_and_only_once(hub: FakeHub) -> None:
    repository = hub.add("a/b", CHECKPOINT)
    told = Told()
    found = load("a/b", told)
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.commit, found.path.name) == (repository.commit, repository.commit)
    assert {path.name: path.read_bytes() for path in found.files} == {
        name: content for name, content in CHECKPOINT.items() if name != "x.bin"
    }
    assert told.lines == ["downloading a/b: 5.01 kB in 3 files"]
    assert told.counted == {"download a/b": 5010, "check files": 5010}
    again = Told()
    assert load("a/b", again) == found
    assert len(hub.downloads()) == 3 and again.lines == []


def test_one_gguf_file_of_several(hub: FakeHub) -> None:
    hub.add("a/b", {"b-Q4_K_M.gguf": b"4" * 100, "b-Q8_0.gguf": b"8" * 200})
    assert load("a/b", choice="Q8_0").path.read_bytes() == b"8" * 200
    assert load("a/b").path.name == "b-Q4_K_M.gguf"


def test_files_of_an_earlier_download_are_checked_too(hub: FakeHub) -> None:
    hub.add("a/b", CHECKPOINT)
    found = load("a/b")
    (weights,) = (path for path in found.files if path.name == "model.safetensors")
    # A download that was killed before its check leaves such a file.
    weights.resolve().write_bytes(b"w" * 4999 + b"W")
    with pytest.raises(UsageError, match=r"model.safetensors arrived damaged and was removed"):
        load("a/b")
    assert load("a/b") == found and weights.read_bytes() == CHECKPOINT["model.safetensors"]


def test_a_new_commit_is_seen(hub: FakeHub) -> None:
    hub.add("a/b", CHECKPOINT)
    old = load("a/b")
    hub.add("a/b", CHECKPOINT | {"model.safetensors": b"v" * 10})
    new = load("a/b")
    assert new.commit != old.commit
    assert {path.name: path for path in new.files}["model.safetensors"].read_bytes() == b"v" * 10


def test_a_cut_connection_is_taken_up_again(hub: FakeHub) -> None:
    content = bytes(range(256)) * 4000
    hub.add("a/b", CHECKPOINT | {"model.safetensors": content}).cut = {"model.safetensors": (100_000, 2)}
    found = load("a/b")
    assert {path.name: path for path in found.files}["model.safetensors"].read_bytes() == content
    assert hub.downloads().count("model.safetensors") == 3


def test_damage_is_found_and_removed(hub: FakeHub) -> None:
    repository = hub.add("a/b", CHECKPOINT, damaged={"model.safetensors": b"W" * 5000})
    with pytest.raises(UsageError, match="arrived damaged and was removed"):
        load("a/b")
    repository.damaged = {}
    found = load("a/b")
    assert {path.name: path for path in found.files}["model.safetensors"].read_bytes() == b"w" * 5000
    hub.add("a/small", CHECKPOINT, damaged={"tokenizer.json": b'{"a": 2}'})
    with pytest.raises(UsageError, match="arrived damaged"):
        load("a/small")


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        ("a/none", {}, "no such file or folder here, and no such model at"),
        ("a/private", {}, "if the model is private, run hf auth login"),
        ("a/gated", {}, "the model is gated; ask for it at"),
        ("a/b", {"revision": "v9"}, "a/b has no branch, tag or commit v9"),
    ],
)
def test_refusals(hub: FakeHub, name: str, facts: dict[str, str], says: str) -> None:
    hub.add("a/b", CHECKPOINT)
    hub.add("a/private", CHECKPOINT, private=True)
    hub.add("a/gated", CHECKPOINT, gated=True)
    with pytest.raises(UsageError, match=says) as caught:
        load(name, **facts)
    assert "\n" not in str(caught.value)


def test_a_token_opens_gated_models(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("a/gated", CHECKPOINT, gated=True, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert load("a/gated").path.is_dir()


def test_without_the_hub_earlier_downloads_are_used(hub: FakeHub) -> None:
    hub.add("a/b", CHECKPOINT)
    found = load("a/b")
    hub.is_down = True
    told = Told()
    assert load("a/b", told).path == found.path
    assert "cannot be reached, so the files that were downloaded before are used" in told.lines[0]
    with pytest.raises(UsageError, match="and it was not downloaded before"):
        load("a/other")


def test_a_full_disk_is_said_before_anything_is_loaded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("a/b", CHECKPOINT)
    usage = namedtuple("usage", "total used free")(10_000, 9_000, 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DoesNotFitError, match="HF_HOME names another place"):
        load("a/b")
    assert hub.downloads() == []


def test_config_alone(hub: FakeHub) -> None:
    hub.add("a/b", CHECKPOINT)
    hub.add("a/gguf", {"b-Q4_0.gguf": b"x"})
    found = download_config(ModelName("a/b"), NoProgress())
    assert found is not None and found.read_bytes() == b"{}" and hub.downloads() == ["config.json"]
    assert download_config(ModelName("a/gguf"), NoProgress()) is None


def test_downloads_are_removed_with_their_content(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/b", CHECKPOINT)
    found = load("a/b")
    assert remove_downloads(found.files) == 5010
    assert [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and path.stat().st_size > 1000] == []
    assert remove_downloads(found.files) == 0
