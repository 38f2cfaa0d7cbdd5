"""Processes that train one policy together: which environments each of them owns, and what they tell each other.

A rank is one process, usually with one GPU or one socket of a machine. W ranks have N environments in all. Gradients
are averaged by Lightning's DDP strategy; everything else goes through `Ranks`. Every rank calls the same methods in the
same order, whatever happens on it alone. With one rank nothing is sent.
"""

import io
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from esper_lightning.runtime.machine import CPU

LONGEST_WAIT = timedelta(days=7)

Record = TypeVar("Record")
Rows = TypeVar("Rows", Tensor, list)


def local_world() -> int:
    """Return the number of processes of the run on this machine, which torchrun and `share_machine` tell."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_machine(processes: int) -> None:
    """Note, for this process and those that it starts, how many processes of the run share the machine's cores."""
    if processes > 1:
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(processes))


class Moments(NamedTuple):
    """Statistics of vectors of one shape."""

    number: int
    mean: Tensor
    var: Tensor  # uncorrected: the mean of the squared deviations


class Ranks:
    """The processes of a run, as one of them sees them.

    Environments are numbered 0 … N - 1 over all ranks. Those of each task, `sizes` in number, are divided into W equal
    parts, and rank r owns part r of each. Raises ValueError if they cannot be shared evenly.
    """

    def __init__(self, sizes: Sequence[int] = (), rank: int = 0, world: int = 1) -> None:
        for size in sizes:
            if size % world:
                low, high = size // world * world, -(-size // world) * world
                raise ValueError(
                    f"{size} environments cannot be shared evenly by {world} processes; "
                    f"set their number to {f'{low} or ' if low else ''}{high}"
                )
        self.rank, self.world = rank, world
        self.sizes, self.total = list(sizes), sum(sizes)
        self.own = self.own_of(rank)  # numbers of this rank's environments
        self._cpu_group: Any = None
        self._own_on: dict[torch.device, Tensor] = {}  # `own` on each device: its upload would wait for a GPU

    def own_of(self, rank: int) -> list[int]:
        """Return the environments of a rank."""
        envs: list[int] = []
        for start, size in zip(accumulate(self.sizes, initial=0), self.sizes, strict=False):
            part = size // self.world
            envs += range(start + rank * part, start + (rank + 1) * part)
        return envs

    def rows(self, everything: Rows, axis: int = 0) -> Rows:
        """Return the rows of this rank's environments, given rows of all environments along `axis`."""
        if self.world == 1:
            return everything
        if isinstance(everything, Tensor):
            device = everything.device
            if device not in self._own_on:
                self._own_on[device] = torch.tensor(self.own, device=device)
            return everything.index_select(axis, self._own_on[device])
        return [everything[i] for i in self.own]

    def join(self, parts: Sequence[Rows], axis: int = 0) -> Rows:
        """Return rows of all environments in their order, given those of every rank along `axis`."""
        if len(parts) == 1:
            return parts[0]
        envs = [env for rank in range(self.world) for env in self.own_of(rank)]  # environment of each row
        order = sorted(range(self.total), key=envs.__getitem__)
        if isinstance(parts[0], list):
            rows = [row for part in parts for row in part]
            return [rows[i] for i in order]
        tensors: list[Any] = list(parts)
        return torch.cat(tensors, axis).index_select(axis, torch.tensor(order, device=tensors[0].device))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of tensors of the same shape over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of tensors of the same shape over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.world == 1:
            return values
        result = values.detach().clone()
        dist.all_reduce(result, operation, group=self._group(result))
        return result

    def sum_with_gradient(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, with W times the gradient of this rank's part: DDP divides gradients by W."""
        # The value of the second term is 0.
        return values if self.world == 1 else self.sum(values) + self.world * (values - values.detach())

    def moments(self, values: Tensor) -> Moments:
        """Return the statistics of vectors [n, …] over all ranks; their number n may differ and may be 0."""
        if self.world == 1 and len(values):
            return Moments(len(values), values.mean(0), values.var(0, correction=0))
        # Two passes: a mean of squares minus the square of the mean would cancel.
        precise = values.double()
        count = precise.new_full((1,), len(values))
        sums = self.sum(torch.cat([count, precise.sum(0).reshape(-1)]))
        total = sums[0].clamp(min=1.0)
        mean = (sums[1:] / total).view(values.shape[1:])
        squares = self.sum((precise - mean).square().sum(0).reshape(-1)).view(values.shape[1:])
        return Moments(int(sums[0]), mean.to(values.dtype), (squares / total).to(values.dtype))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all environments on every rank, given those of this rank's environments."""
        if self.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.contiguous(), group=self._group(rows))
        return self.join(parts)

    def gather(self, record: Record) -> list[Record]:
        """Return the records of all ranks on rank 0, with tensors on the CPU; elsewhere an empty list."""
        if self.world == 1:
            return [record]
        file = io.BytesIO()
        torch.save(record, file)  # pickle would write memory that tensors share for each of them
        parts: list[Any] = [None] * self.world
        dist.gather_object(file.getvalue(), parts if self.rank == 0 else None, dst=0, group=self._group())
        if self.rank > 0:
            return []
        # Bytes of this run's own processes need no check of what they unpickle, which takes several times as long.
        return [torch.load(io.BytesIO(part), map_location=CPU, weights_only=False) for part in parts]

    def gather_everywhere(self, record: Record) -> list[Record]:
        """Return the records of all ranks, on every rank. Tensors in a record must be on the CPU."""
        if self.world == 1:
            return [record]
        records: list[Any] = [None] * self.world
        dist.all_gather_object(records, record, group=self._group())
        return records

    def wait_for_first(self) -> None:
        """Wait on every rank until rank 0 calls this, too, for as long as a week: a group gives up after minutes."""
        if self.world > 1:
            group: Any = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
            dist.barrier(group=group)
            dist.destroy_process_group(group)

    def _group(self, values: Tensor | None = None) -> Any:
        """Return the process group for a tensor; None: the default one. NCCL sends nothing that is on the CPU."""
        if dist.get_backend() != "nccl" or (values is not None and values.is_cuda):
            return None
        if self._cpu_group is None:
            self._cpu_group = dist.new_group(backend="gloo")
        return self._cpu_group


ALONE = Ranks()
"""The only process of a run."""
