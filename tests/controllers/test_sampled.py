from collections import Counter
from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.learned import SampledController
from esper_lightning.envs import HostPool, Op
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy
from tests.controllers.playing import episode


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(3)


@pytest.fixture(scope="module")
def policy(pool: HostPool, make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(pool)


@pytest.fixture(scope="module")
def norm(pool: HostPool) -> RunningMeanStd:
    return RunningMeanStd((len(pool.feature_names),))


def test_what_is_drawn_depends_on_its_own_seed_alone(pool: HostPool, policy: Policy, norm: RunningMeanStd) -> None:
    first = episode(pool, SampledController(policy, norm, rng_seed=1))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = episode(pool, SampledController(policy, norm, rng_seed=1))

    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state()), "and takes nothing from anybody else"
    assert not torch.equal(first, episode(pool, SampledController(policy, norm, rng_seed=2)))


def test_every_episode_goes_on_in_the_stream(pool: HostPool, policy: Policy, norm: RunningMeanStd) -> None:
    controller = SampledController(policy, norm, rng_seed=1)

    assert not torch.equal(episode(pool, controller), episode(pool, controller))


def test_choices_are_as_frequent_as_the_policy_finds_them_likely(
    make_pool: Callable[..., HostPool], policy: Policy, norm: RunningMeanStd
) -> None:
    fresh, controller = make_pool(50), SampledController(policy, norm, rng_seed=0)
    drawn: Counter[int] = Counter()
    for _ in range(20):
        controller.reset(fresh)
        drawn.update(controller.act(fresh).op.tolist())

    with torch.no_grad():
        seen = fresh.observation._replace(features=norm(fresh.observation.features))
        never = torch.zeros(50, dtype=torch.bool)
        distribution, *_ = policy.step(seen, policy.initial_state(50), fresh.masks, starts=never)
    p = distribution.log_probs["op"].exp().mean(0).flatten()[Op.GERMINATE].item()
    assert set(drawn) == {Op.WAIT, Op.GERMINATE}
    assert drawn[Op.GERMINATE] == pytest.approx(1000 * p, abs=5 * (1000 * p * (1 - p)) ** 0.5)
