"""Several processes of one run for tests, as forks of the test's process, which has imported torch already."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.processes import Fork, forked
from tests.runs import SharedParserCLI, fit


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def build_parser() -> None:
    """Build the parser of the command line once, for all forks: it takes longer than a tiny training."""
    if not SharedParserCLI.built:
        with suppress(SystemExit):
            fit(Path(), "--trainer.max_epochs=none of it")  # refused as soon as it is parsed


def rank_variables(rank: int, world: int, port: int, job: str = "test") -> dict[str, str]:
    """Return the environment variables that torchrun sets for one of the processes of a job on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": job}
    return {name: str(value) for name, value in numbers.items()} | texts


def start_ranks(stack: ExitStack, world: int, run: Callable[[], object]) -> list[Fork]:
    """Run a function in `world` forks with the variables of torchrun; they are killed when `stack` is closed."""
    build_parser()
    port = free_port()

    def run_as(rank: int) -> Callable[[], object]:
        def work() -> None:
            os.environ.update(rank_variables(rank, world, port))
            run()

        return work

    return [stack.enter_context(forked(run_as(rank))) for rank in range(world)]


def fit_in_ranks(world: int, root: Path, *args: str, code: int = 0) -> None:
    """Run a tiny training in `world` processes, with its run folder below `root`; all must end with `code`."""
    with ExitStack() as stack:
        codes = [rank.wait() for rank in start_ranks(stack, world, lambda: fit(root, *args))]
    assert codes == [code] * world
