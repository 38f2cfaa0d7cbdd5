"""Fixtures shared by the fault tests: a server that forks programs."""

from collections.abc import Iterator

import pytest

from tests.faults.programs import Start, forked_starter


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    """Start real programs without the seconds that importing torch takes."""
    with forked_starter() as start:
        yield start
