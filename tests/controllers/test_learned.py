"""Controllers that wait, act at random, or act by a policy, on the hosts of its training and on others."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.controllers.learned import LearnedController, TrainingHosts, TrainingRules
from esper_lightning.controllers.rules import RandomValid, WaitOnly
from esper_lightning.envs import HEADS, ActionConfig, HostPool, Observation, Op
from esper_lightning.envs.actions import RELEVANT_OPS
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.hosts import CNN
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import make_norm
from tests.decisions import episode
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch

MakePool = Callable[..., HostPool]


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    return make_pool(3)


def test_waiting_grows_nothing(pool: HostPool) -> None:
    assert not episode(pool, WaitOnly()).any()
    assert pool.parameter_counts.tolist() == [390] * 3


def test_random_decisions_are_legal_of_every_kind_and_reproducible_by_seed(pool: HostPool) -> None:
    controller = RandomValid(0)
    episodes = torch.stack([episode(pool, controller) for _ in range(4)])  # [episodes, T, heads, N]

    ops, *_ = taken = episodes.movedim(2, 0).flatten(1)
    for head, choices in zip(HEADS, taken, strict=True):
        matters = torch.tensor([Op(op) in RELEVANT_OPS[head] for op in ops.tolist()])
        assert set(choices[matters].tolist() or [0]) == set(range(len(getattr(pool.space, head)))), head
        assert not choices[~matters].any(), "what does not matter is 0"
    assert torch.equal(episodes[0], episode(pool, RandomValid(0)))
    assert not torch.equal(episodes[0], episodes[1]), "every episode goes on in the stream of random numbers"
    assert not torch.equal(episodes[0], episode(pool, RandomValid(6)))


def test_a_random_op_is_drawn_first_and_evenly(make_pool: Callable[..., HostPool]) -> None:
    # Germination is possible in three slots and waiting in one way only, yet both ops are equally likely.
    fresh, controller = make_pool(50), RandomValid(0)
    ops = Counter(op for _ in range(20) for op in controller.act(fresh).op.tolist())

    assert set(ops) == {Op.WAIT, Op.GERMINATE}
    assert ops[Op.WAIT] == pytest.approx(500, abs=5 * (1000 * 0.25) ** 0.5)


@pytest.fixture(scope="module")
def policy(pool: HostPool, make_policy: Callable[..., Policy]) -> Policy:
    """Policy with preferences, as if trained: it fossilizes if possible, and otherwise germinates."""
    made = make_policy(pool)
    with torch.no_grad():
        made.heads.tables["op"].layers[2].bias.copy_(torch.tensor([1.0, 2.0, 0.0, 3.0]))
    return made


@pytest.fixture(scope="module")
def norm(pool: HostPool) -> nn.Module:
    made = make_norm(pool.rows)
    made.update(pool.observation.features)
    return made


def test_what_was_learned_is_played_legally_without_chance_and_teaches_nothing(
    pool: HostPool, policy: Policy, norm: nn.Module
) -> None:
    before = [value.clone() for value in (*policy.state_dict().values(), *norm.state_dict().values())]
    controller = LearnedController(policy, norm)

    first = episode(pool, controller)
    torch.manual_seed(1)
    second = episode(pool, controller)

    assert torch.equal(first, second)
    assert {Op.GERMINATE, Op.FOSSILIZE} <= set(first[:, 0].flatten().tolist())
    after = (*policy.state_dict().values(), *norm.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_of_a_host_that_was_rolled_back_nothing_is_remembered(
    make_pool: MakePool, policy: Policy, norm: nn.Module
) -> None:
    watched, controller = make_pool(3, governor=ONLY_NAN_DIVERGES), LearnedController(policy, norm)
    watched.reset([1, 2, 3])
    controller.reset(watched)
    for _ in range(2):
        watched.step(controller.act(watched))
    with breaking_epoch(watched, [1]):
        watched.step(controller.act(watched))
    remembered = controller.state
    controller.act(watched)

    seen, never = Observation(norm(watched.observation.features)), torch.zeros(3, dtype=torch.bool)
    with torch.no_grad():
        _, fresh = policy.encode_step(seen, policy.initial_state(3), never)
        _, going_on = policy.encode_step(seen, remembered, never)
    for now, after_nothing, after_all in zip(controller.state, fresh, going_on, strict=True):
        torch.testing.assert_close(now[1], after_nothing[1])
        torch.testing.assert_close(now[[0, 2]], after_all[[0, 2]])
        assert not torch.allclose(after_nothing, after_all)
    watched.reset([1, 2, 3])
    assert not watched.episode_starts.any(), "and the next episode begins for all alike"


def trained_on(pool: HostPool) -> TrainingHosts:
    config = pool.config
    rules = TrainingRules(config.lifecycle, config.actions)
    return TrainingHosts(pool.space, pool.feature_names, config.observation, rules)


def test_a_policy_plays_hosts_with_other_slots_and_blueprints(
    make_pool: MakePool, pool: HostPool, policy: Policy, norm: nn.Module
) -> None:
    slots = ["block1", "block1.pool", "block2", "block2.pool", "block3"]
    five_slots = partial(CNN, base=4, kernel=1, pools=2, slots=slots, isolate=False, channels_last=False)
    more = make_pool(3, five_slots, actions=replace(pool.config.actions, blueprints=["norm", "attention"]))
    controller = LearnedController(policy, norm, trained_on(pool))

    taken = episode(more, controller)

    assert controller.observation == pool.config.observation and controller.rules.actions == pool.config.actions
    assert Op.GERMINATE in taken[:, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actions": ActionConfig(tempos={"FAST": 1})},
            r"chooses among \['FAST', 'SLOW'\] with its tempo head, these hosts offer \['FAST'\]; .*\"SLOW\": 2",
        ),
        (
            {"actions": ActionConfig(tempos={"FAST": 1, "SLOW": 6})},
            r"blended in within \{'FAST': 1, 'SLOW': 2\} ticks, those of these hosts within \{'FAST': 1, 'SLOW': 6\}",
        ),
        ({"observation": ObservationConfig(hidden=["gap"])}, "reads other features than these hosts show, as gap"),
    ],
)
def test_hosts_with_other_choices_or_features_are_refused(
    make_pool: MakePool, pool: HostPool, policy: Policy, norm: nn.Module, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LearnedController(policy, norm, trained_on(pool)).reset(make_pool(1, **changes))
