"""Selection of observed features and of masks for a policy."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy
from tests.decisions import WAIT, act, cull, fossilize, germinate

MakePool = Callable[..., HostPool]


def test_hidden_features_are_not_there_and_the_others_are_the_same(make_pool: MakePool) -> None:
    whole, part = make_pool(1), make_pool(1, sight=ObservationConfig(hidden=["*.contribution*", "blueprints"]))
    for pool in (whole, part):
        pool.reset([3])
        for decision in (germinate(0, 1), WAIT, WAIT):
            pool.step(act(decision))
    kept = [i for i, name in enumerate(whole.feature_names) if "contribution" not in name]
    assert len(whole.feature_names) - len(kept) == 3 * 3  # known, value and velocity for each slot
    assert part.feature_names == [whole.feature_names[i] for i in kept]
    assert torch.equal(part.observation.features, whole.observation.features[:, kept])
    assert whole.observation.blueprints.any() and not part.observation.blueprints.any()


def test_a_policy_may_be_blind_to_everything_but_time(make_pool: MakePool) -> None:
    pool = make_pool(2, sight=ObservationConfig(shown=["progress"]))
    assert pool.feature_names == ["progress"]
    pool.step(act(germinate(0, 1), WAIT))
    assert pool.observation.features.flatten().tolist() == pytest.approx([1 / 6] * 2)
    assert not pool.observation.blueprints.any()


def test_without_masks_everything_is_offered_and_what_is_impossible_is_waiting(make_pool: MakePool) -> None:
    free, masked = make_pool(3, sight=ObservationConfig(masks=False)), make_pool(3)
    for pool in (free, masked):
        pool.reset([2, 4, 6])
    assert free.masks.slot.all() and free.masks.blueprint.all() and not free.masks.ended.any()
    step = free.step(act(fossilize(0), cull(1), germinate(0, 1)))
    assert step.action.op.tolist() == [Op.FOSSILIZE, Op.CULL, Op.GERMINATE], "learned from as it was chosen"
    expected = masked.step(act(WAIT, WAIT, germinate(0, 1)))
    assert torch.equal(step.observation.features, expected.observation.features)
    assert torch.equal(step.metrics.objective, expected.metrics.objective)
    assert [env.last_op for env in free.envs] == [Op.WAIT, Op.WAIT, Op.GERMINATE]
    assert free.masks.slot.all() and not free.masks_on_cpu.slot.all()


def test_a_veto_for_one_host_changes_nothing_of_what_another_chose(make_pool: MakePool) -> None:
    governor = GovernorConfig(max_growth=1.01)
    pool = make_pool(2, sight=ObservationConfig(masks=False), governor=governor)
    step = pool.step(act(fossilize(0), germinate(0, 2)))
    assert [veto.host for veto in step.vetoes] == [1]
    assert step.action.op.tolist() == [Op.FOSSILIZE, Op.WAIT]


def test_a_policy_learns_without_masks(make_pool: MakePool, make_policy: Callable[..., Policy]) -> None:
    pool = make_pool(3, sight=ObservationConfig(masks=False))
    loop = RolloutCollector(
        pool,
        make_policy(pool),
        observation_norm=nn.Identity(),
        value_norm=RunningMeanStd((), clip=float("inf")),
        config=PPOConfig(),
        run_rng_seed=7,
    )
    loop.reset()
    for _ in range(loop.pool.horizon):
        loop.step()
    rollout, _ = loop.finish()
    assert (rollout.action.op[0] != Op.GERMINATE).sum() > (rollout.action.op[0] == Op.WAIT).sum(), "culls of nothing"
    assert rollout.log_prob.isfinite().all()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden": ["acuracy.0"]}, "no feature is called 'acuracy.0'; did you mean 'accuracy.0'"),
        ({"shown": ["nothing*"]}, "no feature is called 'nothing\\*'"),
        ({"hidden": ["*"]}, "shows no feature"),
        ({"shown": ["blueprints"]}, "shows no feature"),
    ],
)
def test_a_pattern_that_shows_nothing_is_refused(make_pool: MakePool, config: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_pool(1, sight=ObservationConfig(**config))
