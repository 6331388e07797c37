import pytest


@pytest.fixture(autouse=True)
def _plain_code() -> None:
    """These tests are about the code that artifacts have."""
