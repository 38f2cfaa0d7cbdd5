"""Training steps replayed as CUDA graphs, on an imitated GPU, do bit for bit what they do without graphs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.envs.device_transfer import upload
from esper_lightning.envs.execution import FusedExecutor
from esper_lightning.envs.execution.fused import graphs
from esper_lightning.envs.execution.fused.epoch import FusedEpoch
from esper_lightning.growth import GrowingNetwork
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import AugmentConfig, Digits
from esper_lightning.tasks.task import Measures
from tests.envs.execution.fused.hosts import FAST_CONFIG, make, play
from tests.envs.execution.fused.test_arena import Twins, live, lives, tensors_of
from tests.imitated_gpu import GPU, ImitatedGpu
from tests.imitated_graphs import REFUSAL

BATCHES = 4

TRAINING = replace(FAST_CONFIG.training, batches=BATCHES)

NO_FAMILY = FamilyConfig()

SGD = {"optimizer": "sgd", "weight_decay": 0.01, "max_grad_norm": None}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn": ("cnn", {}),
    "half precision": ("cnn", {"precision": "fp16", "optimizer": "adamw", "weight_decay": 0.01}),
    "bfloat16": ("cnn, gradients through seeds", {"precision": "bf16"}),
    "micro-batches": ("cnn", {"micro_batches": 2, "augment": AugmentConfig(pad=1, flip=True, cutout=3)}),
    "sgd": ("residual", SGD),
    "tokens": ("gpt", {}),
    "dropout": ("gpt, dropout", {}),
    "family": ("mlp", {"family": FamilyConfig(train=[{"fail": [0.5], "training.lr": [0.01, 0.02]}])}),
}
"""Host, and training settings or a family, by name."""

exactly = partial(torch.testing.assert_close, rtol=0.0, atol=0.0, equal_nan=True)


def make_both(
    host: str, n_envs: int = 3, family: FamilyConfig = NO_FAMILY, **training: Any
) -> tuple[HostPool, HostPool]:
    """Return a pool with CUDA graphs and one without, on the imitated GPU."""

    def make_one(cuda_graphs: bool) -> HostPool:
        settings = replace(TRAINING, cuda_graphs=cuda_graphs, **training)
        return make("fused", host, n_envs, torch.float32, device=GPU, training=settings, family=family)

    return make_one(True), make_one(False)


def assert_equal(ours: HostPool, theirs: HostPool) -> None:
    for a, b in zip(ours.envs, theirs.envs, strict=True):
        exactly(list(tensors_of(a)), list(tensors_of(b)))
        assert a.scaler.state_dict() == b.scaler.state_dict()


def train(pool: HostPool) -> Tensor:
    """Train all hosts for one epoch."""
    return pool.executor.train_epoch(pool.envs, pool.data.train)


def counts(pool: HostPool) -> tuple[int, int]:
    """Return the captured steps and the replays since the last call."""
    (cache,) = pool.executor.graphs.values()
    captures, replays = cache.take_counts().values()
    return captures, replays


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_whatever_grows_replays_change_nothing(case: str) -> None:
    host, training = CASES[case]
    ticks = 12
    with ImitatedGpu() as gpu:
        pools, records, waits = make_both(host, **training), [], []
        for pool in pools:
            gpu.waits.clear()
            records.append(play(pool, ticks))
            waits.append(gpu.waits.total())
        assert gpu.faults == {}

    assert_equal(*pools)
    exactly(*(record.numbers for record in records))
    assert {Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY} <= records[0].stages
    assert waits[0] == waits[1]
    counted = pools[0].clock.take_counts()
    assert counted["graph.captures"] > 2
    assert counted["graph.replays"] >= ticks * (BATCHES - 1)
    assert pools[1].clock.take_counts() == {}


def germinate(pool: HostPool, slot: str, blueprints: Sequence[str], stage: Stage | None = None) -> None:
    for env, blueprint in zip(pool.envs, blueprints, strict=True):
        env.growing.germinate(slot, blueprint)
        if stage is not None:
            env.growing.slots[slot].move_to(stage)


def replace_seed(growing: GrowingNetwork, slot: str, blueprint: str) -> None:
    growing.remove_seed(slot)
    growing.germinate(slot, blueprint)


def test_a_graph_serves_all_epochs_of_its_signature() -> None:
    captured, known = (1, BATCHES - 1), (0, BATCHES)
    expected: list[tuple[int, int]] = []
    with ImitatedGpu() as gpu:
        pools = make_both("cnn", 2, precision="fp16")

        def epoch(result: tuple[int, int]) -> None:
            rows = [train(pool) for pool in pools]
            exactly(*rows)
            expected.append(result)
            assert counts(pools[0]) == result, f"epoch {len(expected)}"

        epoch(captured)
        for pool in pools:
            pool.reset([5, 6])
        epoch(known)
        for pool in pools:
            germinate(pool, "block1", ["norm", "norm"])  # the arena grows
        epoch(captured)
        for pool in pools:
            replace_seed(pool.envs[1].growing, "block1", "norm")
        epoch(known)
        for pool in pools:
            for stage in (Stage.TRAINING, Stage.BLENDING):
                pool.envs[0].growing.slots["block1"].move_to(stage)
        epoch(captured)
        for pool in pools:
            replace_seed(pool.envs[1].growing, "block1", "conv_light")
        epoch(captured)
        for pool in pools:
            pool.reset([7, 8])
        epoch(captured)  # where the arena has moved to
        assert gpu.faults.keys() <= {"aten::sub between devices"}, "the comparison's own"

    assert_equal(*pools)


class GraphTwins(Twins):
    """A pool with CUDA graphs and one without, to which the same things happen."""

    def __init__(self) -> None:
        self.fused, self.loop = make_both("mlp")
        self.executors = [self.fused.executor]
        self.executors += [FusedExecutor(pool.task, pool.config.training) for pool in (self.fused, self.loop)]

    def compare(self) -> None:
        assert_equal(self.fused, self.loop)


LIFE = [
    ("germinate", 1, "layer1", 0, True),
    ("snapshot", 1, "layer1", 0, False),
    ("roll back", 1, "layer1", 0, True),
    ("load", 2, "layer1", 0, True),
    ("executor", 0, "layer1", 1, True),
    ("executor", 0, "layer1", 0, False),
]


@pytest.mark.slow
def test_hosts_that_are_rolled_back_loaded_or_trained_elsewhere() -> None:
    with ImitatedGpu() as gpu:
        live(GraphTwins(), LIFE)
        assert gpu.faults == {}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(life=lives)
def test_whatever_happens_to_hosts(life: list[tuple[str, int, str, int, bool]]) -> None:
    with ImitatedGpu():
        live(GraphTwins(), life)


@pytest.mark.slow
def test_a_resumed_pool_goes_on_bit_for_bit() -> None:
    with ImitatedGpu():
        pool, resumed = (make_both("cnn")[0] for _ in range(2))
        play(pool, 3)
        play(resumed, 1)
        resumed.load_state_dict(pool.state_dict())
        for one in (pool, resumed):
            play(one, 3, reset=False)

    assert_equal(pool, resumed)


@pytest.mark.slow
def test_no_more_steps_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_STEPS", 1)
    with ImitatedGpu():
        pools = make_both("mlp")
        for pool in pools:
            pool.reset(range(3))
            germinate(pool, "layer1", ["norm"] * 3)
            for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
                for env in pool.envs:
                    env.growing.slots["layer1"].move_to(stage)
                train(pool)
        (cache,) = pools[0].executor.graphs.values()
        assert counts(pools[0])[0] > 1
        assert len(cache._steps) == 1

    assert_equal(*pools)


class ReadingTask(Digits):
    """Task that reads its losses."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Measures:
        measures = super().measure(outputs, targets)
        assert measures.loss.sum().item() >= 0.0
        return measures


def test_a_step_that_cannot_be_captured_runs_without_graphs_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ImitatedGpu(), caplog.at_level(logging.WARNING):
        pools = make_both("mlp")
        for pool in pools:
            pool.executor.task = ReadingTask()
            pool.reset(range(3))
            germinate(pool, "layer1", ["norm"] * 3)
            train(pool), train(pool)
        assert counts(pools[0]) == (0, 0)

    assert_equal(*pools)
    (record,) = caplog.records
    start = "training.cuda_graphs: hosts train without graphs, a step cannot be captured: operation not permitted"
    assert record.getMessage().startswith(start)


def test_a_step_that_fails_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a defect")

    with ImitatedGpu() as gpu:
        pool = make_both("mlp")[0]
        steps = FusedEpoch.update_weights
        monkeypatch.setattr(FusedEpoch, "update_weights", lambda epoch: (fail if gpu.capturing else steps)(epoch))
        with pytest.raises(TypeError, match="a defect"):
            train(pool)
        assert gpu.capturing is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_replays_change_nothing(case: str) -> None:
    host, training = CASES[case]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        pools = make_both(host, **training)
        records = [play(pool, 12) for pool in pools]
    finally:
        torch.use_deterministic_algorithms(False)

    assert_equal(*pools)
    exactly(*(record.numbers for record in records))
    assert counts(pools[0])[1] >= 12 * (BATCHES - 1)


@pytest.mark.parametrize(("executor", "device"), [("loop", GPU), ("auto", GPU), ("fused", torch.device("cpu"))])
def test_graphs_need_executor_fused_on_a_gpu(executor: str, device: torch.device) -> None:
    match = rf"^training.cuda_graphs needs executor fused on a GPU, not {executor} on {device}; leave it off$"
    with ImitatedGpu(), pytest.raises(ValueError, match=match):
        make(executor, "mlp", 1, device=device, training=replace(TRAINING, cuda_graphs=True))


class TestImitation:
    """What holds for CUDA graphs holds for the imitated ones."""

    @staticmethod
    def capture(work: Callable[[], object], *, generators: Sequence[torch.Generator] = ()) -> Any:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def test_a_capture_computes_nothing_and_each_replay_computes_from_what_is_there(self) -> None:
        with ImitatedGpu():
            x, total = torch.ones(3, device=GPU), torch.zeros((), device=GPU)
            generator = torch.Generator(GPU)
            generator.manual_seed(1)

            def work() -> None:
                total.add_((x * 2).sum() * torch.rand((), device=GPU, generator=generator).ceil())

            graph = self.capture(work, generators=[generator])
            state = generator.get_state().tolist()
            assert total.tolist() == 0.0
            graph.replay()
            assert total.tolist() == 6.0
            x.fill_(2.0)
            graph.replay()
            assert total.tolist() == 18.0
            assert generator.get_state().tolist() != state

    def test_a_replay_does_not_use_memory_that_was_freed(self) -> None:
        with ImitatedGpu():
            operands, total = [torch.ones(3, device=GPU)], torch.zeros(3, device=GPU)
            graph = self.capture(lambda: total.add_(operands[0]))
            operands.clear()
            with pytest.raises(AssertionError, match="freed"):
                graph.replay()

    def test_a_pool_ends_with_its_last_graph(self) -> None:
        with ImitatedGpu() as gpu, torch.cuda.stream(torch.cuda.Stream(GPU)):
            pool, graphs_of_pool = torch.cuda.graph_pool_handle(), []
            for _ in range(2):
                graphs_of_pool.append(torch.cuda.CUDAGraph())
                graphs_of_pool[-1].capture_begin(pool=pool)
                graphs_of_pool[-1].capture_end()
            graphs_of_pool.clear()
            with pytest.raises(RuntimeError, match="all gone"):
                torch.cuda.CUDAGraph().capture_begin(pool=pool)
            assert gpu.capturing is None

    @pytest.mark.parametrize(
        "work",
        [
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: bool(x.any()),
            lambda x: upload([1.0], x.device),
            lambda x: torch.tensor([1.0], device=x.device),
            lambda x: torch.rand(2, device=x.device, generator=torch.Generator(x.device)),
            lambda x: torch.cuda.Event(enable_timing=True).record(torch.cuda.current_stream(x.device)),
            lambda x: torch.cuda.current_stream(x.device).record_event().synchronize(),
        ],
    )
    def test_what_cuda_refuses_is_refused(self, work: Callable[[Tensor], object]) -> None:
        with ImitatedGpu() as gpu:
            x = torch.ones(3, device=GPU)
            with pytest.raises(RuntimeError) as error:
                self.capture(lambda: work(x))
            assert REFUSAL in str(error.value.__context__)
            assert gpu.capturing is None
            assert x.tolist() == [1.0] * 3
