from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.learned import LearnedController
from esper_lightning.envs import HostPool, Observation, Op
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy
from tests.controllers.playing import episode
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(3)


@pytest.fixture(scope="module")
def policy(pool: HostPool, make_policy: Callable[..., Policy]) -> Policy:
    """Policy with preferences, as if trained: it fossilizes if possible, and otherwise germinates."""
    made = make_policy(pool)
    with torch.no_grad():
        made.heads.tables["op"].output.bias.copy_(torch.tensor([1.0, 2.0, 0.0, 3.0]))
    return made


@pytest.fixture(scope="module")
def norm(pool: HostPool) -> RunningMeanStd:
    made = RunningMeanStd((len(pool.feature_names),))
    made.update(torch.randn(20, len(pool.feature_names), generator=torch.Generator().manual_seed(0)))
    return made


def test_what_was_learned_is_played_legally_and_without_chance(
    pool: HostPool, policy: Policy, norm: RunningMeanStd
) -> None:
    controller = LearnedController(policy, norm)

    first = episode(pool, controller)
    torch.manual_seed(1)
    second = episode(pool, controller)

    assert torch.equal(first, second)
    assert set(first[:, 0].flatten().tolist()) == {Op.GERMINATE, Op.FOSSILIZE}


def test_the_policy_is_shown_normalised_features_and_remembers_the_episode(
    pool: HostPool, policy: Policy, norm: RunningMeanStd, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Observation] = []
    real = policy.decide

    def watched(observation: Observation, *rest: object, **more: object) -> object:
        shown.append(observation)
        return real(observation, *rest, **more)

    monkeypatch.setattr(policy, "decide", watched)
    controller = LearnedController(policy, norm)
    pool.reset([1, 2, 3])
    controller.reset(pool)
    raw = pool.observation.features.clone()
    pool.step(controller.act(pool))
    after_one = [part.clone() for part in controller.state]
    controller.act(pool)

    torch.testing.assert_close(shown[0].features, ((raw - norm.mean) / norm.var.sqrt()).clamp(-10, 10))
    assert not any(torch.equal(a, b) for a, b in zip(after_one, controller.state, strict=True))
    controller.reset(pool)
    assert not any(part.any() for part in controller.state)


def test_playing_teaches_nothing(pool: HostPool, policy: Policy, norm: RunningMeanStd) -> None:
    before = [value.clone() for value in (*policy.state_dict().values(), *norm.state_dict().values())]

    episode(pool, LearnedController(policy, norm))

    after = (*policy.state_dict().values(), *norm.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_of_a_host_that_was_rolled_back_nothing_is_remembered(
    make_pool: Callable[..., HostPool], policy: Policy, norm: RunningMeanStd
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

    seen = Observation(norm(watched.observation.features), watched.observation.blueprints)
    never = torch.zeros(3, dtype=torch.bool)
    with torch.no_grad():
        _, _, fresh = policy.step(seen, policy.initial_state(3), watched.masks, starts=never)
        _, _, going_on = policy.step(seen, remembered, watched.masks, starts=never)
    for now, after_nothing, after_all in zip(controller.state, fresh, going_on, strict=True):
        torch.testing.assert_close(now[1], after_nothing[1])
        torch.testing.assert_close(now[[0, 2]], after_all[[0, 2]])
        assert not torch.allclose(after_nothing, after_all)
    watched.reset([1, 2, 3])
    assert not watched.episode_starts.any(), "and the next episode begins for all alike"
