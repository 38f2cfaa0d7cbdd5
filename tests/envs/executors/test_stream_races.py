"""CUDA streams: no races and no needless waiting. Complete on a GPU; the logic is tested on any machine."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import StreamsExecutor
from esper_lightning.envs.executors.loop import HostEpoch
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.decisions import CPU
from tests.envs.executors.fake_cuda import Event, FakeCuda, RaceDetector, Stream
from tests.runs import differences

MakePool = Callable[..., HostPool]

GPU = torch.device("cuda", 0)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark for tests that need a GPU."""
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def gpu_pool(n_envs: int, executor: str = "streams", **changes: Any) -> HostPool:
    task = Digits(validation=100, test=100)
    return HostPool(
        task, task.load(), small_host, config=replace(SMALL, executor=executor, **changes), n_envs=n_envs, device=GPU
    )


def on_streams(pool: HostPool) -> HostPool:
    """Let a pool on the CPU train its hosts on fake streams."""
    pool.executor = StreamsExecutor(pool.task, pool.config.training)
    return pool


def play(pool: HostPool, seed: int = 3) -> list[Tensor]:
    """Play one random episode and return all its measurements."""
    wanderer = RandomValid(seed)
    pool.reset([seed + i for i in range(pool.n_envs)])
    seen = [part for _ in range(pool.config.horizon) for part in pool.step(wanderer.act(pool)).metrics]
    return [*seen, pool.test_scores()[1]]


@contextmanager
def reproducible_kernels() -> Iterator[None]:
    """Make cuDNN kernels reproducible; cuBLAS kernels are, because torch gives it a workspace for every stream."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def watch(fake: FakeCuda, patch: pytest.MonkeyPatch, pool: HostPool) -> list[tuple[int, str, Stream]]:
    """Record environment, kind of work and stream of all further work of executors."""
    notes: list[tuple[int, str, Stream]] = []
    begin, step, measure = HostEpoch.__init__, HostEpoch.step, StreamsExecutor._measure

    def note(env: HostEnv, what: str) -> None:
        stream = fake.current(env.device)
        stream.log.append(what)
        notes.append((pool.envs.index(env), what, stream))

    def watched_begin(epoch: HostEpoch, env: HostEnv, *args: Any, **options: Any) -> None:
        note(env, "begin")
        begin(epoch, env, *args, **options)

    def watched_step(epoch: HostEpoch, i: int) -> None:
        note(epoch.env, f"batch {i}")
        step(epoch, i)

    def watched_measure(executor: StreamsExecutor, env: HostEnv, *args: Any) -> Tensor:
        note(env, "validate")
        return measure(executor, env, *args)

    patch.setattr(HostEpoch, "__init__", watched_begin)
    patch.setattr(HostEpoch, "step", watched_step)
    patch.setattr(StreamsExecutor, "_measure", watched_measure)
    return notes


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nothing_races(make_pool: MakePool, fake_cuda: FakeCuda, precision: str) -> None:
    """F1: events order any two operations on the same memory that are on different streams, forward and backward, and
    no memory is given away while another stream works on it. F5: so too in fp16, where every step reads and writes the
    scaler; no two hosts share one."""
    pool = on_streams(make_pool(3, training=HostTraining(batches=2, micro_batches=2, precision=precision)))
    with RaceDetector(fake_cuda, CPU) as races:
        play(pool)

    assert races.races == set()
    assert races.operations > 10_000
    scales = {env.loss_scale.scale.data_ptr() for env in pool.envs if env.loss_scale is not None}
    assert len(scales) == (3 if precision == "fp16" else 0)


def test_without_events_there_would_be_races(
    make_pool: MakePool, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: races are found where streams do not wait for each other's events."""
    pool = on_streams(make_pool(2))
    monkeypatch.setattr(StreamsExecutor, "_ordered_streams", lambda executor, envs: nullcontext())
    with RaceDetector(fake_cuda, CPU) as races:
        play(pool)

    assert any("stack" in operation for operation in races.races)  # of the results
    assert any("adam" in operation for operation in races.races)  # on weights that were reset
    assert "memory" in races.races


@on_gpu
def test_streams_do_what_the_loop_does_bit_for_bit_on_a_gpu() -> None:
    """F1: streams give the loop's measurements and weights bit for bit over 200 batches × 8 environments in fp32, while
    seeds of all kinds come and go."""
    with reproducible_kernels():
        pools = [gpu_pool(8, name, training=HostTraining(lr=0.02, batches=200)) for name in ("loop", "loop", "streams")]
        loop, again, streams = ([pool, play(pool)] for pool in pools)

    for other, what in ((again, "kernels on this GPU are not reproducible"), (streams, "a race")):
        assert all(torch.equal(a, b) for a, b in zip(loop[1], other[1], strict=True)), what
        for ours, theirs in zip(loop[0].envs, other[0].envs, strict=True):
            assert all(
                torch.equal(a, b)
                for a, b in zip(ours.network.state_dict().values(), theirs.network.state_dict().values(), strict=True)
            ), what


def test_one_context_covers_a_batch_and_validation_waits_for_no_other_host(
    make_pool: MakePool, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: an environment's batches and its validation are on one stream of its own; batches are outside and
    environments inside. S2: validation waits for the host's own last batch alone; only the stack of all results waits
    for all hosts."""
    pool = on_streams(make_pool(3, training=HostTraining(batches=2)))
    notes = watch(fake_cuda, monkeypatch, pool)
    pool.step(RandomValid(0).act(pool))

    order = [(0, "begin"), (1, "begin"), (2, "begin"), (0, "batch 0"), (1, "batch 0"), (2, "batch 0")]
    for env in range(3):
        order += [(env, "batch 1"), (env, "validate")]
    assert [(env, what) for env, what, _ in notes] == order
    streams = [pool.executor._stream(env) for env in pool.envs]
    common = fake_cuda.default[CPU]
    assert all(stream is streams[env] for env, _, stream in notes) and len({common, *streams}) == 4
    for stream in streams:
        first, *rest = stream.log
        assert isinstance(first, Event) and first.stream is common
        assert rest == ["begin", "batch 0", "batch 1", "validate"], "no wait in between"
    assert [event.stream for event in common.log] == streams
    assert set(fake_cuda.recorded) == {common}, "what streams made is known to be used on this one"


@on_gpu
@pytest.mark.parametrize("executor", ["loop", "streams"])
def test_scalers_on_a_gpu_agree_with_those_of_lone_hosts(executor: str) -> None:
    """F5: a host's scaler and weights come out among eight hosts as if it were alone."""
    training = HostTraining(lr=0.02, batches=20, precision="fp16")
    with reproducible_kernels():
        pools = [gpu_pool(n, executor, training=training) for n in (8, 1)]
        for pool in pools:
            pool.reset([50 + i for i in range(pool.n_envs)])
            pool.train_without_actions(3)

    among, alone = (pool.envs[0].state_dict() for pool in pools)
    assert among["loss_scale"] == alone["loss_scale"] and among["skipped_steps"] == alone["skipped_steps"]
    cpu = [{name: value.cpu() for name, value in state["growing"]["network"].items()} for state in (among, alone)]
    assert differences(*cpu) == []


def test_a_stream_is_made_once(make_pool: MakePool, fake_cuda: FakeCuda) -> None:
    """S1: a pool makes one stream per environment, however many episodes it plays."""
    pool = on_streams(make_pool(3))
    for seed in range(2):
        play(pool, seed)

    assert Stream.n_created == 3


@on_gpu
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_memory_is_flat_over_50_rollouts(executor: str) -> None:
    """S1: 50 equal rollouts leave the GPU's memory as five of them leave it."""
    pool = gpu_pool(4, executor)

    def memory() -> dict[str, int]:
        gc.collect()
        stats = torch.cuda.memory_stats(GPU)
        return {kind: stats[f"{kind}.all.current"] for kind in ("allocated_bytes", "reserved_bytes", "segment")}

    for rollout in range(50):
        play(pool)
        if rollout == 4:
            early = memory()
    late = memory()
    assert late["allocated_bytes"] == early["allocated_bytes"]
    assert late["reserved_bytes"] <= early["reserved_bytes"] and late["segment"] <= early["segment"]


@on_gpu
def test_one_host_is_validated_while_another_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the first host's validation begins before the last host's training ends, by events in their streams."""
    pool = gpu_pool(8)
    pool.train_without_actions(1)
    marks: list[tuple[HostEnv, torch.cuda.Event]] = []

    def marked(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(executor: StreamsExecutor, env: HostEnv, *args: Any) -> Any:
            marks.append((env, torch.cuda.current_stream(GPU).record_event(torch.cuda.Event(enable_timing=True))))
            return work(executor, env, *args)

        return run

    monkeypatch.setattr(StreamsExecutor, "_measure", marked(StreamsExecutor._measure))
    pool.train_without_actions(1)
    torch.cuda.synchronize()

    # A host is validated right after its last batch, in its own stream.
    (first, begun), *_, (last, trained) = marks
    assert (first, last) == (pool.envs[0], pool.envs[-1])
    assert begun.elapsed_time(trained) > 0.0
