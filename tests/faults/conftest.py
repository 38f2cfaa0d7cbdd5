"""What tests of faults share: a server that forks programs."""

from collections.abc import Iterator

import pytest

from tests.faults.programs import Start, forked


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    """Starts real programs without the seconds that torch takes to be imported."""
    with forked() as start:
        yield start
