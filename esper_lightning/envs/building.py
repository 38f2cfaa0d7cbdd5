"""Building of many hosts, with an estimate of its time and memory, and a progress bar."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from esper_lightning.console import print_status
from esper_lightning.machine import resident_memory

Env = TypeVar("Env")

SAMPLE = 64
"""Number of hosts by which time and memory of all are estimated."""

LEAST_SECONDS = 5.0
"""Estimated time in seconds from which building is announced."""


def build_envs(make: Callable[[int], Env], n_envs: int) -> list[Env]:
    """Return the environments `make(0)`, `make(1)`, … up to `n_envs`.

    If that takes long, a line says about how long and how much memory, and a terminal shows a progress bar.
    """
    envs = [make(0)]  # it warms up: the first is slower, and what hosts share is made with it
    begun, memory_before = perf_counter(), resident_memory()
    sampled = min(n_envs, SAMPLE + 1)
    envs += [make(index) for index in range(1, sampled)]
    share = (n_envs - 1) / max(1, sampled - 1)
    seconds = (perf_counter() - begun) * share
    left = range(sampled, n_envs)
    if not left or seconds < LEAST_SECONDS:
        return [*envs, *(make(index) for index in left)]
    memory = resident_memory()
    room = ""
    if memory is not None and memory_before is not None:
        room = f" and {max(0.0, memory - memory_before) * share / 1024:.1f} GiB of memory"
    print_status(f"building {n_envs} hosts: about {seconds:.0f} s{room}; lower the number of hosts if that is too much")
    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("hosts", total=n_envs, completed=sampled)
        for index in left:
            envs.append(make(index))
            progress.advance(task)
    return envs
