"""State that survives a rollback, and the reward of a rollback."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool, Op
from esper_lightning.governor.judge import Verdict
from esper_lightning.growth.param_groups import group_names
from esper_lightning.growth.slot import EXTRA_STATE
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import objective
from tests.decisions import WAIT, act, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.envs.episodes import (
    MakePool,
    accuracy_by_forward_pass,
    fossilize_in_broken_epoch,
)
from tests.runs import differences


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if not name.endswith(EXTRA_STATE)}


def test_what_is_kept_for_good_survives_a_rollback_in_the_very_same_tick(rarely_snapshotting_pool: HostPool) -> None:
    rarely_snapshotting_pool.reset([3, 4])
    rarely_snapshotting_pool.step(act(germinate(0, 1), WAIT))
    for _ in range(2):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    before = deepcopy(weights_of(rarely_snapshotting_pool.envs[0].network))
    assert rarely_snapshotting_pool.envs[0].slots[0].stage is Stage.PROBATIONARY
    step = fossilize_in_broken_epoch(rarely_snapshotting_pool)

    env = rarely_snapshotting_pool.envs[0]
    assert [word.verdict.outcome for word in step.verdicts] == [Verdict.ROLL_BACK]
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(before, weights_of(env.network)) == []
    assert step.metrics.parameters[0] == 390 + sum(p.numel() for p in env.slots[0].seed.parameters())
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    for _ in range(5):
        step = rarely_snapshotting_pool.step(act(WAIT, WAIT))
    with breaking_epoch(rarely_snapshotting_pool, [0]):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(before, weights_of(env.network)) == [], "the same snapshot serves again"


def test_what_was_alive_is_culled_and_its_slot_opens_again(rarely_snapshotting_pool: HostPool) -> None:
    fossilize_in_broken_epoch(rarely_snapshotting_pool)
    env = rarely_snapshotting_pool.envs[0]
    rarely_snapshotting_pool.step(act(germinate(1, 1), germinate(1, 1)))
    rarely_snapshotting_pool.step(act(germinate(2), WAIT))
    env.take_snapshot()  # a snapshot with live seeds
    with breaking_epoch(rarely_snapshotting_pool, [0]):
        step = rarely_snapshotting_pool.step(act(WAIT, WAIT))

    assert [
        (event.host, event.tick, event.seed_event.slot, event.seed_event.after, event.seed_event.cause)
        for event in step.events
        if event.host == 0
    ] == [
        (0, 7, "block2.pool", Stage.CULLED, "rolled back"),
        (0, 7, "block3", Stage.CULLED, "rolled back"),
    ]
    assert [slot.stage for slot in env.slots] == [Stage.FOSSILIZED, Stage.CULLED, Stage.CULLED]
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    assert set(env.optimizer.state) == set(env.network.parameters()), "nothing is known of what is gone"
    assert not rarely_snapshotting_pool.masks.slot[0, Op.GERMINATE].any()
    assert rarely_snapshotting_pool.envs[1].slots[1].live, "a neighbour's is left alone"
    for _ in range(2):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert rarely_snapshotting_pool.masks.slot[0, Op.GERMINATE].tolist() == [False, True, True]


def measure_objective(pool: HostPool, host: int, committed: bool = False) -> float:
    """Compute J of one host from its weights, with all seeds or with the fossilized ones."""
    env = pool.envs[host]
    kept = [slot for slot in env.slots if slot.stage is Stage.FOSSILIZED]
    gone = [slot.name for slot in env.slots if slot not in kept] if committed else []
    accuracy = accuracy_by_forward_pass(env.network, pool.data.validation, gone)
    parameters = 390 + sum(p.numel() for slot in kept for p in slot.seed.parameters())
    return objective(torch.tensor([accuracy]), torch.tensor([parameters]), 390, pool.config.objective.price).item()


def test_a_rollback_costs_the_penalty_and_ends_the_trajectory_there(rarely_snapshotting_pool: HostPool) -> None:
    step = fossilize_in_broken_epoch(rarely_snapshotting_pool)

    assert step.reward.tolist()[0] == step.metrics.reward.tolist()[0] == -0.75
    assert step.terminated.tolist() == rarely_snapshotting_pool.episode_starts.tolist() == [True, False]
    assert step.truncated.tolist() == [False, False]
    assert step.metrics.objective[0].item() == pytest.approx(measure_objective(rarely_snapshotting_pool, 0))
    (word,) = step.verdicts
    assert str(word) == "host 0 (RNG seed 3) rolled back at tick 4, to tick 3: loss is nan"
    assert step.observation.features.isfinite().all()

    before = measure_objective(rarely_snapshotting_pool, 0)
    step = rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert step.terminated.tolist() == [False, False]
    assert step.reward[0].item() == pytest.approx(measure_objective(rarely_snapshotting_pool, 0) - before, abs=1e-6)


def test_a_rollback_at_the_horizon_ends_the_episode_as_ever(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES, horizon=4)
    for fault in (False, True):
        pool.reset([1, 2])
        pool.step(act(germinate(0, 2), germinate(0, 2)))
        for _ in range(2):
            pool.step(act(WAIT, WAIT))
        with breaking_epoch(pool, [0] if fault else []):
            step = pool.step(act(fossilize(0), WAIT))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [True, True]
    assert step.reward[0] == -0.75
    for i in range(2):
        assert step.metrics.objective[i].item() == pytest.approx(measure_objective(pool, i, committed=True))
    with pytest.raises(ValueError, match="the episode is over after 4 ticks"):
        pool.step(act(WAIT, WAIT))
    pool.reset([1, 2])
    assert not pool.episode_starts.any()
