"""CUDA graphs of fused training steps: captured once for each signature, then replayed with one launch each.

Tested by imitation only (`tests/imitated_graphs.py`), not yet on a GPU.

The *signature* of an epoch is all that decides which kernels a step runs: the training settings, the number of hosts,
for each slot the kinds of seeds and their numbers, and which per-host tensors there are. Which host has which seed is
data. The first minibatch of an epoch with a new signature runs as without graphs, so that libraries choose their
kernels; the step is captured before the second one.

A graph repeats its kernels with the addresses that they had when it was captured. Weights, gradients and optimizer
state lie at fixed addresses in the arena; if the arena moves, all graphs are dropped. All other tensors belong to the
epoch that was captured. A later epoch copies its own into them before its first replay, and takes totals, loss scales
and running statistics back after its last one. A counter on the device selects the minibatch.
"""

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.execution.fused.epoch import FusedEpoch
from esper_lightning.envs.execution.fused.stacked_host import HostStack
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.hosts.dropout import dropout_generators
from esper_lightning.tasks import Batches, Split, Task

logger = logging.getLogger(__name__)

MAX_STEPS = 8
"""Most captured steps of one stack; each keeps the minibatches of an epoch and an index per weight in memory.

Few signatures recur: that of hosts without seeds in every episode, and the present one while no seed comes or goes."""


class CapturedStep:
    """A training step as two CUDA graphs: gradients, and the update of the weights.

    Between the two, gradients can be read.

    Args:
        epoch: Epoch whose step is captured. Its tensors are the memory of the graphs; nothing is computed.
        pool: Handle of the graphs' memory pool.

    Raises RuntimeError if the step cannot be captured.
    """

    def __init__(self, epoch: "GraphedEpoch", pool: Any) -> None:
        self.inputs, self.state = epoch.inputs(), epoch.state()
        self.gradients, self.update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for generator in dropout_generators(epoch.stack.network):
            self.gradients.register_generator_state(generator)
        with _capture(self.gradients, pool):
            epoch.compute_gradients(0)
        with _capture(self.update, pool):
            epoch.update_weights()
        self.healthy = epoch.healthy  # the first graph writes it and the second one reads it

    def load(self, epoch: "GraphedEpoch") -> None:
        """Copy the inputs and the state of another epoch with the same signature to where the graphs read them."""
        _copy([*epoch.inputs(), *epoch.state()], [*self.inputs, *self.state])

    def store(self, epoch: "GraphedEpoch") -> None:
        """Copy the state back to that epoch."""
        _copy(self.state, epoch.state())


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    # Not torch.cuda.graph, which waits for the GPU and empties the caches of all allocators.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


class GraphCache:
    """Captured steps of one stack.

    Args:
        device: The stack's GPU.

    Attributes:
        failed: True once a capture has failed; then nothing is captured any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.failed = False
        self._stream = torch.cuda.Stream(device)
        self._steps: dict[Hashable, CapturedStep] = {}  # by signature, the least recently used first
        self._bound: list[object] = []  # what all graphs are bound to: addresses and generators
        self._pool: Any = None
        self._captures = self._replays = 0

    def find(self, epoch: "GraphedEpoch") -> CapturedStep | None:
        """Return the captured step of an epoch's signature, or None. Drops all steps that the arena has left behind."""
        bound = epoch.bound()
        if bound != self._bound:
            self._steps, self._bound = {}, bound
            # A new one: torch refuses to capture into a pool whose graphs are all gone.
            self._pool = torch.cuda.graph_pool_handle()
        signature = epoch.signature()
        step = self._steps.pop(signature, None)
        if step is not None:
            self._steps[signature] = step
        return step

    def capture(self, epoch: "GraphedEpoch") -> CapturedStep | None:
        """Capture the step of an epoch whose signature is new. Returns None, and says why once, if that fails."""
        if self.failed:
            return None
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(current.record_event())
        try:
            with torch.cuda.stream(self._stream):
                step = CapturedStep(epoch, self._pool)
        except RuntimeError as error:
            self.failed = True
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            logger.warning("training.cuda_graphs: hosts train without graphs, a step cannot be captured: %s", reason)
            return None
        current.wait_event(self._stream.record_event())
        if len(self._steps) == MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[epoch.signature()] = step
        self._captures += 1
        return step

    def count_replay(self) -> None:
        """Count a minibatch that was a replay."""
        self._replays += 1

    def take_counts(self) -> dict[str, int]:
        """Return the captured steps and the replays since the last call, by name."""
        taken = {"graph.captures": self._captures, "graph.replays": self._replays}
        self._captures = self._replays = 0
        return taken


class GraphedEpoch(FusedEpoch):
    """`FusedEpoch` whose steps are replays of CUDA graphs once its signature is captured.

    An epoch of a single minibatch is never captured. The time to fetch and augment minibatches counts as training.
    """

    def __init__(
        self, stack: HostStack, envs: Sequence[HostEnv], task: Task, *, data: Split, cache: GraphCache
    ) -> None:
        super().__init__(stack, envs, task, data=data)
        self.cache = cache
        self.next_part = torch.zeros(1, dtype=torch.int64, device=self.totals.device)
        self.captured = cache.find(self)
        if self.captured is not None:
            self.captured.load(self)

    def bound(self) -> list[object]:
        """Return what graphs are bound to for good: addresses of data and arena, and generators."""
        fixed = [*self.data, self.weights.values, self.weights.grads, *self.weights.states.values()]
        return [*(tensor.data_ptr() for tensor in fixed), *dropout_generators(self.stack.network)]

    def signature(self) -> Hashable:
        """Return all that decides which kernels a step runs."""
        return tuple(
            (found.shape, found.dtype) if isinstance(found, Tensor) else found for found in self._dependencies()
        )

    def inputs(self) -> list[Tensor]:
        """Return the tensors of this epoch that a step reads."""
        return [found for found in self._dependencies() if isinstance(found, Tensor)]

    def _dependencies(self) -> list[object]:
        optimizer, weights = self.optimizer, self.weights
        groups = [weights.group_of_weight, weights.group_of_parameter, weights.first_parameters]
        rates = [optimizer.host_of_group, optimizer.learning_rates, optimizer.weight_decays]
        drawn = [self.batches.indices, *self.batches.augment_params]
        # Rates are in the tensors, so that they may differ between episodes.
        settings = replace(self.training, lr=1.0, lr_schedule="constant", seed_lr_factor=1.0, weight_decay=0.0)
        tensors = [*drawn, *groups, *rates, self.frozen_mask]
        return [settings, optimizer.has_weight_decay, *tensors, *self.stack.dependencies()]

    def state(self) -> list[Tensor]:
        """Return the tensors outside the arena's flat memory that steps change."""
        scaling = [] if self.scaler is None else [self.scaler.scales, self.scaler.good_steps]
        statistics = [stacked for section in self.weights.residents for stacked in section.stacked_buffers]
        return [self.next_part, self.totals, self.skipped_steps, *scaling, *statistics]

    def step(self, i: int) -> None:
        if i == 1 and self.captured is None:
            self.captured = self.cache.capture(self)
        super().step(i)

    def compute_gradients(self, i: int) -> None:
        if self.captured is None:
            super().compute_gradients(i)
        else:
            self.captured.gradients.replay()
            self.cache.count_replay()

    def update_weights(self) -> None:
        if self.captured is None:
            super().update_weights()
        else:
            self.captured.update.replay()

    def result(self) -> Tensor:
        if self.captured is not None:
            self.captured.store(self)
        return super().result()

    def _micro_batch(self, part: int) -> Batches:
        batch = self.batches.minibatch_at(self.next_part)
        self.next_part += 1
        return batch

    def _record(self, **shares: float) -> None:
        """Record nothing: events must not be captured."""
