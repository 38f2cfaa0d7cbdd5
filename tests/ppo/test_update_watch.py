"""Diagnostics of an update: gradient norms of the policy, and transitions whose ratio exploded."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch

from esper_lightning.envs import HostPool
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.update_watch import WORST_TRANSITIONS, RatioRange, UpdateWatch
from tests.ppo.loops import total

MakeLoop = Callable[..., RolloutCollector]
Played = tuple[RolloutCollector, HostPool, Rollout]

EVERYTHING = RatioRange(1.0, 1.0)


@pytest.fixture(scope="module")
def played_once(make_loop: MakeLoop, play_rollout: Callable[[RolloutCollector], None]) -> Played:
    """Return a collector whose second rollout is finished, its hosts and the rollout."""
    loop = make_loop(3)
    for _ in range(2):
        play_rollout(loop)
        rollout, _ = loop.finish()
    assert isinstance(loop.pool, HostPool)
    return loop, loop.pool, rollout


@pytest.fixture
def played(played_once: Played) -> Iterator[Played]:
    """Return the same with the policy that acted, and restore this policy after the test."""
    policy = played_once[0].policy
    weights = deepcopy(policy.state_dict())
    yield played_once
    policy.load_state_dict(weights)
    policy.zero_grad()


def move(loop: RolloutCollector, size: float) -> None:
    """Change all weights of the policy at random."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loop.policy.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def test_the_worst_transitions_are_reported_with_the_log_probabilities_of_every_head(played: Played) -> None:
    loop, pool, rollout = played
    usual, watch = RatioRange(0.7, 1.5), UpdateWatch(loop, pool)
    watch.before_step()
    move(loop, 0.3)
    watch.before_step()  # only the first call sees the policy that acted

    reported = watch.exploded_ratios(usual, update=2)

    with torch.no_grad():
        after = loop.policy(rollout.observation, rollout.state, rollout.masks, rollout.starts)[0]
    log_ratio = (after.log_prob(rollout.action) - rollout.log_prob).double()
    outside = (log_ratio.exp() < usual.low) | (log_ratio.exp() > usual.high)
    assert outside.sum() > WORST_TRANSITIONS and not (outside & rollout.masks.forced).any()
    worst = log_ratio[outside].abs().sort(descending=True).values[:WORST_TRANSITIONS]
    assert [abs(sum(one.after) - sum(one.before)) for one in reported] == pytest.approx(worst.tolist(), rel=1e-4)
    for one in reported:
        step = one.action_tick - 7  # six ticks per rollout: the second one begins at tick 7
        assert (one.tick, one.update) == (12, 2)
        assert sum(one.before) == pytest.approx(rollout.log_prob[step, one.host].item(), rel=1e-4)
        assert sum(one.after) - sum(one.before) == pytest.approx(log_ratio[step, one.host].item(), rel=1e-3)
        action = [int(head[step, one.host]) for head in rollout.action]
        assert one.action == pool.space.describe(action)
        row = after.log_probs["op"][step, one.host, 0]
        assert one.after[one.heads.index("op")] == pytest.approx(row[action[0]].item(), rel=1e-4)
    assert len({(one.action_tick, one.host) for one in reported}) == len(reported)


def test_ratios_within_the_bounds_are_not_reported(played: Played) -> None:
    loop, pool, _ = played
    watch = UpdateWatch(loop, pool)
    assert watch.exploded_ratios(EVERYTHING, 1) == [], "no optimizer step, no change"
    watch.before_step()
    move(loop, 1e-3)

    assert watch.exploded_ratios(RatioRange(0.5, 2.0), 1) == []
    assert len(watch.exploded_ratios(EVERYTHING, 1)) == WORST_TRANSITIONS


def test_a_ratio_that_is_not_a_number_is_the_worst(played: Played) -> None:
    loop, pool, _ = played
    watch = UpdateWatch(loop, pool)
    watch.before_step()
    with torch.no_grad():
        loop.policy.heads.tables["tempo"].output.bias.fill_(math.nan)

    reported = watch.exploded_ratios(RatioRange(0.0, 1e30), 1)

    assert reported and all(math.isnan(one.after[one.heads.index("tempo")]) for one in reported)


def test_gradient_norms_are_means_over_the_steps_of_the_update(played: Played) -> None:
    loop, pool, rollout = played
    watch, seen = UpdateWatch(loop, pool), []
    assert watch.gradient_norms() == {}
    for minibatch in rollout.minibatches(1, 2, loop.generator):
        loop.policy.zero_grad()
        total(ppo_terms(loop.policy, minibatch, PPOConfig())).backward()
        watch.before_step()
        gradients = {name: parameter.grad for name, parameter in loop.policy.named_parameters()}
        seen.append({name: 0.0 if g is None else g.double().norm().item() for name, g in gradients.items()})

    assert watch.gradient_norms() == pytest.approx({name: (seen[0][name] + seen[1][name]) / 2 for name in seen[0]})
    assert seen[0]["encoder.weight"] > 0.0
