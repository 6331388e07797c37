"""How commands end where they refuse what they were given."""

from helpers.support import Ended


def assert_refused(ended: Ended, code: int, *says: str) -> None:
    """Check that a command printed nothing but one line of error with these texts, which is none of its own faults."""
    assert ended.err.startswith("error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert "internal error" not in ended.err
    for text in says:
        assert text in ended.err
    assert ended.code == code
    assert ended.out == ""
