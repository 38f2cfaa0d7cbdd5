"""Count the operations that executor fused starts in a tick of N digits hosts.

    python -m benchmarks.launches --hosts 64

Operations are those of ATen, backward passes included, without views and without memory that is only reserved. Each
starts at least one kernel on a GPU. `copied` counts the tensors that a tick joins, stacks or splits up: an operation on
many tensors starts several kernels.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.execution import step
from benchmarks.hosts import BATCHES, CASES, SEED_PLACEMENTS, ExecutorChoice, make_pool
from esper_lightning.envs import HostPool

ALLOCATIONS = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach"})
"""Operations that only reserve memory or share it."""


class Launches(TorchDispatchMode):
    """Counts operations, and the tensors in their lists."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.listed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(part.alias_info is not None and not part.alias_info.is_write for part in schema.returns)
        if not is_view and schema.name not in ALLOCATIONS:
            self.operations += 1
            lists = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, list | tuple)]
            self.listed += sum(isinstance(value, Tensor) for arg in lists for value in arg)
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> Launches:
    """Return the operations of one call."""
    with Launches() as launches:
        work()
    return launches


def counted_row(pool: HostPool) -> str:
    """Return the line of the table for hosts that have settled: their seeds do not change."""
    for _ in range(2):
        step(pool)
    training = count(lambda: pool.executor.train_epoch(pool.envs, pool.data.train)).operations
    validation = count(lambda: pool.executor.validate(pool.envs, pool.data.validation)).operations
    tick = count(lambda: step(pool))
    return f"{training:>9,} {training / BATCHES:>14,.0f} {validation:>11,} {tick.operations:>6,} {tick.listed:>7,}"


def main() -> None:
    """Parse the arguments, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64, help="number of hosts N")
    hosts = parser.parse_args().hosts
    case = CASES["digits"]
    data = case.task.load()
    print(f"{'seeds':<10} {'training':>9} {'per minibatch':>14} {'validation':>11} {'tick':>6} {'copied':>7}")
    for seeds in SEED_PLACEMENTS:
        pool = make_pool(case, data, hosts, ExecutorChoice("fused", False), seeds)
        print(f"{seeds:<10} {counted_row(pool)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
