"""Faults inside one host do not affect other hosts: NaN and infinite numbers, and lack of memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool, StepResult
from esper_lightning.envs.executors import StreamsExecutor
from esper_lightning.envs.executors.fused.executor import FusedEpoch
from esper_lightning.envs.governor import Verdict
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from tests.conftest import SMALL
from tests.decisions import WAIT, act, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES
from tests.envs.executors.fake_cuda import FakeCuda
from tests.runs import differences
from tests.tiers import pairs_of, rest_is_slow

MakePool = Callable[..., HostPool]

WATCHED = replace(ONLY_NAN_DIVERGES, snapshot_every=1, cooldown=0, penalty=0.5)

HORIZON = 6


@torch.no_grad()
def fill(parameter: Tensor, value: float) -> None:
    parameter.view(-1)[0] = value


def fill_seed(env: HostEnv, value: float) -> None:
    """Spoil a seed in TRAINING: its gradients become NaN, while the host's output stays sound."""
    assert env.slots[0].stage is Stage.TRAINING
    for parameter in env.slots[0].seed.parameters():
        fill(parameter, value)


def first(env: HostEnv) -> nn.Parameter:
    return next(env.network.parameters())


FAULTS: dict[str, Callable[[HostEnv], object]] = {
    "NaN in weights": lambda env: fill(first(env), math.nan),
    "inf in weights": lambda env: fill(first(env), math.inf),
    "NaN in momentum": lambda env: fill(env.optimizer.state[first(env)]["exp_avg"], math.nan),
    # In the last layer's outputs, beyond float32, or beyond half precision where it is used.
    "overflow": lambda env: env.network.head.weight.data.fill_(3e38 if env.loss_scale is None else 1e5),
    "NaN in gradients": lambda env: fill_seed(env, math.nan),
    "inf in gradients": lambda env: fill_seed(env, math.inf),
}


def pool_of(make_pool: MakePool, executor: str, precision: str = "fp32", **changes: Any) -> HostPool:
    training = HostTraining(batches=2, precision=precision)
    settings = {"governor": WATCHED, "horizon": HORIZON, "training": training, "executor": executor} | changes
    return make_pool(3, **settings)


def germinate_in_every_host(pool: HostPool, blueprint: int = 0) -> None:
    """Return a pool in which every host has a seed in TRAINING."""
    pool.reset([1, 2, 3])
    pool.step(act(*[germinate(0, blueprint)] * 3))


def state_of_other_hosts(pool: HostPool, step: StepResult) -> list[Any]:
    """Return the whole state of hosts 0 and 2."""
    seen = (*step.observation, step.reward, step.terminated, step.truncated, *step.masks, *step.metrics)
    return [[part[i].clone() for part in seen] + [deepcopy(pool.envs[i].state_dict())] for i in (0, 2)]


@pytest.mark.parametrize(
    ("executor", "precision", "fault"),
    [
        *rest_is_slow(
            product(["loop", "fused"], ["fp32", "bf16", "fp16"], FAULTS),
            lambda case: case[:2] == ("fused", "fp32") or case[1:] == ("fp16", "NaN in weights"),
        ),
        *rest_is_slow([("threads", "fp32", fault) for fault in FAULTS], lambda case: case[2] == "NaN in weights"),
    ],
)
def test_numbers_that_are_none_stay_in_their_host_which_is_rolled_back(
    make_pool: MakePool, executor: str, precision: str, fault: str
) -> None:
    pool = pool_of(make_pool, executor, precision)
    germinate_in_every_host(pool)
    untouched = state_of_other_hosts(pool, pool.step(act(WAIT, WAIT, WAIT)))
    germinate_in_every_host(pool)
    good = deepcopy(pool.envs[1].state_dict()["growing"]["network"])
    FAULTS[fault](pool.envs[1])
    step = pool.step(act(WAIT, WAIT, WAIT))
    assert differences(state_of_other_hosts(pool, step), untouched) == []
    if precision == "fp16" and "gradients" in fault:
        # In half precision every step was skipped: the loss says nothing, so the Governor must be patient.
        (word,) = step.verdicts
        assert (word.host, word.decision) == (1, Verdict.SUSPICIOUS)
        step = pool.step(act(WAIT, WAIT, WAIT))
        assert "every step was skipped" in step.verdicts[0].cause

    assert [(word.host, word.decision) for word in step.verdicts] == [(1, Verdict.ROLL_BACK)]
    env = pool.envs[1]
    assert step.reward[1] == -0.5 and step.terminated.tolist() == [False, True, False]
    assert not any(slot.live for slot in env.slots)
    now = env.network.state_dict()
    weights = {name: value for name, value in now.items() if not name.endswith("_extra_state")}
    assert differences({name: good[name] for name in weights}, weights) == []
    for _ in range(2):
        step = pool.step(act(WAIT, WAIT, WAIT))
        assert not any(word.decision.diverged for word in step.verdicts)  # in fp16 the loss scale may still be settling
        assert all(part.isfinite().all() for part in (*step.metrics, step.reward, step.observation.features))


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_a_spoiled_seed_whose_gradients_show_nothing_is_found_when_it_is_blended(
    make_pool: MakePool, executor: str
) -> None:
    pool = pool_of(make_pool, executor, lifecycle=replace(SMALL.lifecycle, isolation="straight_through"))
    germinate_in_every_host(pool, blueprint=2)  # a single layer: its gradient does not depend on its weights
    fill_seed(pool.envs[1], math.nan)
    step = pool.step(act(WAIT, WAIT, WAIT))
    assert step.verdicts == [] and pool.envs[1].slots[0].stage is Stage.BLENDING
    step = pool.step(act(WAIT, WAIT, WAIT))

    assert [(word.host, word.decision) for word in step.verdicts] == [(1, Verdict.ROLL_BACK)]
    assert step.metrics.loss.isfinite().all() and not pool.envs[1].slots[0].occupied


def no_memory_on_the_processor() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def no_memory_in_python() -> None:
    raise MemoryError


def no_memory_on_the_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of …")


SHORTAGES = [no_memory_on_the_processor, no_memory_in_python, no_memory_on_the_gpu]


@contextmanager
def short_of_memory(env: HostEnv, fail: Callable[[], None], training: bool) -> Iterator[None]:
    """Let the host's network request more memory than there is, in training or in validation."""

    def ask(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if network.training == training:
            fail()

    handle = env.network.register_forward_pre_hook(ask)
    yield
    handle.remove()


@pytest.fixture
def pool(make_pool: MakePool, fake_cuda: FakeCuda, request: pytest.FixtureRequest) -> HostPool:
    made = pool_of(make_pool, "threads" if request.param == "threads" else "loop")
    if request.param == "streams":
        made.executor = StreamsExecutor(made.task, made.config.training)
    return made


@pytest.mark.parametrize(
    ("pool", "fail", "training"), pairs_of(["loop", "threads", "streams"], SHORTAGES, [True, False]), indirect=["pool"]
)
def test_a_host_that_runs_out_of_memory_ends_its_episode_and_not_the_run(
    pool: HostPool, fail: Callable[[], None], training: bool
) -> None:
    germinate_in_every_host(pool)
    untouched = state_of_other_hosts(pool, pool.step(act(WAIT, WAIT, WAIT)))
    germinate_in_every_host(pool)
    env = pool.envs[1]
    good = deepcopy(env.network.state_dict())
    with short_of_memory(env, fail, training):
        step = pool.step(act(WAIT, WAIT, WAIT))

    assert differences(state_of_other_hosts(pool, step), untouched) == []
    (word,) = step.verdicts
    assert (word.host, word.tick, word.seed, word.decision) == (1, 2, 2, Verdict.END)
    assert word.cause.startswith("out of memory: ") and len(word.cause.splitlines()) == 1
    assert str(word).startswith("host 1 (RNG seed 2) ended at tick 2")
    assert step.reward[1] == -0.5 and step.terminated.tolist() == [False, True, False]
    assert pool.masks.ended.tolist() == [False, True, False]
    left = {name: value for name, value in env.network.state_dict().items() if not name.endswith("_extra_state")}
    assert differences({name: good[name] for name in left}, left) == []
    for tick in range(3, HORIZON + 1):
        step = pool.step(act(WAIT, WAIT, WAIT))
        assert step.verdicts == [] and step.truncated.tolist() == [tick == HORIZON] * 3
    assert step.reward[1] == 0.0 and pool.test_scores()[1].isfinite().all()
    pool.reset([1, 2, 3])
    step = pool.step(act(WAIT, WAIT, WAIT))
    assert step.verdicts == [], "the next episode is as any other"


@pytest.mark.parametrize(
    ("executor", "fail"),
    rest_is_slow(
        product(["loop", "threads", "fused"], SHORTAGES), set(zip(["loop", "threads", "fused"], SHORTAGES, strict=True))
    ),
)
def test_a_host_whose_seed_does_not_fit_into_memory_ends_its_episode(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, executor: str, fail: Callable[[], None]
) -> None:
    pool = pool_of(make_pool, executor)
    pool.reset([1, 2, 3])
    pool.step(act(WAIT, WAIT, WAIT))
    with monkeypatch.context() as patch:
        patch.setattr("esper_lightning.growth.slot.build_seed", lambda *_, **__: fail())
        step = pool.step(act(WAIT, germinate(0, 2), WAIT))

    assert [str(word).split(":")[1] for word in step.verdicts] == [" out of memory"]
    assert [(word.host, word.decision) for word in step.verdicts] == [(1, Verdict.END)]
    assert pool.envs[1].slots[0].stage is Stage.DORMANT and step.metrics.score.isfinite().all()
    assert [env.ended for env in pool.envs] == [False, True, False]
    step = pool.step(act(germinate(0, 2), WAIT, germinate(0, 2)))
    assert step.verdicts == [] and [env.slots[0].occupied for env in pool.envs] == [True, False, True]


def test_a_host_without_even_memory_to_be_validated_is_left_as_it_was_measured_last(make_pool: MakePool) -> None:
    pool = pool_of(make_pool, "loop")
    germinate_in_every_host(pool)
    before = pool.step(act(WAIT, WAIT, WAIT)).metrics
    env = pool.envs[1]
    with short_of_memory(env, no_memory_on_the_gpu, True), short_of_memory(env, no_memory_on_the_gpu, False):
        step = pool.step(act(WAIT, WAIT, WAIT))
        assert [word.decision for word in step.verdicts] == [Verdict.END]
        assert step.metrics.score[1] == before.score[1]
        for _ in range(3):
            step = pool.step(act(WAIT, WAIT, WAIT))
            assert step.verdicts == [] and step.observation.features.isfinite().all()
        with pytest.raises(MemoryError, match=r"host 1 \(RNG seed 2\): out of memory"):
            pool.test_scores()[1]  # an error is better than a made-up number


@pytest.mark.parametrize("training", [True, False])
def test_without_a_governor_the_error_is_raised(make_pool: MakePool, training: bool) -> None:
    pool = pool_of(make_pool, "loop", governor=None)
    germinate_in_every_host(pool)
    shortage = short_of_memory(pool.envs[1], no_memory_on_the_processor, training)
    with shortage, pytest.raises(MemoryError, match=r"host 1 \(RNG seed 2\): out of memory: .*can't allocate memory"):
        pool.step(act(WAIT, WAIT, WAIT))


@pytest.mark.parametrize("fail", SHORTAGES)
def test_a_stack_that_does_not_fit_into_memory_is_an_error(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    pool = pool_of(make_pool, "fused")
    germinate_in_every_host(pool)
    monkeypatch.setattr(FusedEpoch, "_accumulate_gradients", lambda *_: fail())
    with pytest.raises(MemoryError, match=r"3 hosts as one network: out of memory: .*; use env\.executor loop"):
        pool.step(act(WAIT, WAIT, WAIT))
