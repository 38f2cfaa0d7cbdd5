"""All stages, executors and controllers share one code path."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from esper_lightning.controllers.learned import Controller, LearnedController
from esper_lightning.controllers.rules import Heuristic, RandomValid
from esper_lightning.envs import Action, HostPool, StepResult
from esper_lightning.envs.executors.fused.executor import FusedEpoch
from esper_lightning.envs.executors.loop import HostEpoch
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.stages import Stage
from esper_lightning.ppo.collector import RolloutCollector
from tests.conftest import FREE
from tests.tiers import rest_is_slow

BATCHES = 3

IN_STEP = ContextVar("in_step", default=False)


def count_training(patch: pytest.MonkeyPatch, epoch: type) -> Counter[str]:
    """Count the train steps of an executor, and the backward passes inside and outside of them."""
    counted: Counter[str] = Counter()
    step, backward = epoch.step, torch.Tensor.backward

    def counted_step(self: Any, i: int) -> None:
        counted["steps"] += 1
        token = IN_STEP.set(True)
        step(self, i)
        IN_STEP.reset(token)

    def counted_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        counted["within" if IN_STEP.get() else "outside"] += 1
        backward(self, *args, **kwargs)

    patch.setattr(epoch, "step", counted_step)
    patch.setattr(torch.Tensor, "backward", counted_backward)
    return counted


@pytest.mark.parametrize(
    ("executor", "epoch", "at_once"),
    rest_is_slow(
        [("loop", HostEpoch, 1), ("threads", HostEpoch, 1), ("fused", FusedEpoch, 3)], lambda case: case[0] != "loop"
    ),
)
def test_every_stage_under_every_controller_learns_in_one_train_step(
    make_loop: Callable[..., RolloutCollector],
    make_pool: Callable[..., HostPool],
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    epoch: type,
    at_once: int,
) -> None:
    """A1: with any stages of seeds and any controller, a host trains only in the executor's train step, with one
    backward pass per step."""
    changes = {"training": HostTraining(batches=BATCHES), "executor": executor}
    pool, free = make_pool(3, **changes), make_pool(3, **FREE | changes)
    loop = make_loop(3)
    learned = LearnedController(loop.policy, loop.observation_norm)
    stages: set[Stage] = set()
    plays: list[tuple[HostPool, Controller]] = [(pool, Heuristic()), (pool, learned), (free, RandomValid(3))]
    for of, controller in plays:
        counted = count_training(monkeypatch, epoch)
        of.reset([1, 2, 3])
        controller.reset(of)
        for tick in range(1, of.config.horizon + 1):
            of.step(controller.act(of))
            stages |= {slot.stage for env in of.envs for slot in env.slots}
            steps = tick * BATCHES * 3 // at_once
            assert counted == {"steps": steps, "within": steps}
        monkeypatch.undo()

    assert stages >= {Stage.DORMANT, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED}


def test_every_controller_goes_through_the_same_step(
    make_loop: Callable[..., RolloutCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: training, evaluation of the learned policy and the heuristic all use `HostPool.step`."""
    loop = make_loop(2)
    pool, stepped, real = loop.pool, [], HostPool.step

    def watched(self: HostPool, action: Action) -> StepResult:
        stepped.append(self)
        return real(self, action)

    monkeypatch.setattr(HostPool, "step", watched)
    loop.reset()
    loop.step()
    assert stepped == [pool]
    for controller in (LearnedController(loop.policy, loop.observation_norm), Heuristic()):
        stepped.clear()
        play_episode(pool, "any", controller, rng_seeds=[1, 2])
        assert stepped == [pool] * pool.config.horizon
