"""JSON files of a checkpoint: read within bounds, or refused in one line."""

from pathlib import Path

import pytest

from picompile.errors import UnsupportedModelError
from picompile.frontend.json_file import MOST_CONFIG_BYTES, read_json_object, read_text, token_ids


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not readable as JSON"),
        (b'{"a": 1', "not readable as JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' stands twice"),
        (b'{"a": 1, "a": 1}', "the key 'a' stands twice"),
        (b'\xff\xfe{"a": 1}', "cannot be read: 'utf-8' codec"),
        (b'{"a":' * 100_000, "not readable as JSON: maximum recursion depth"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "not readable as JSON: Exceeds the limit"),
        (b'{"a": "' + b"x" * MOST_CONFIG_BYTES + b'"}', "has more than 16 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_json_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_json_object(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_files_that_are_none_or_without_end(tmp_path: Path) -> None:
    file = tmp_path / "terabyte.json"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(UnsupportedModelError, match="has more than 1 MiB"):
        read_text(file, 1 << 20)
    (tmp_path / "loop.json").symlink_to("loop.json")
    for name in ("none.json", "loop.json", "."):
        with pytest.raises(UnsupportedModelError, match="cannot be read"):
            read_json_object(tmp_path / name)
    file.write_text('{"a": "ä"}')
    assert read_json_object(file) == {"a": "ä"}


def test_token_ids() -> None:
    for value, ids in ((None, ()), (0, (0,)), (7, (7,)), ([], ()), ([7, 3], (7, 3))):
        assert token_ids({"eos_token_id": value}, "eos_token_id", "config.json") == ids
    assert token_ids({}, "eos_token_id", "config.json") == ()
    for wrong in ("7", True, 7.0, -1, 2**31, {}, [["7"]], [7, "7"], [True], [7, -1]):
        with pytest.raises(UnsupportedModelError, match="here: eos_token_id must be a token id or a list of them"):
            token_ids({"eos_token_id": wrong}, "eos_token_id", "here")
