"""Distribution over contexts: what differs between episodes, and that nothing else does."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.family import Context, ContextDistribution, FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.envs.vector_env import TRAINING, episode_rng_seeds
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.tasks import Digits, Task, TaskData, make_variants
from tests.conftest import SMALL
from tests.decisions import WAIT, act, germinate
from tests.envs.executors.episodes import same
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

cnn = partial(
    CNN, base=4, kernel=1, pools=2, slots=["block1.pool", "block2.pool", "block3"], isolate=False, channels_last=False
)

FACTS: dict[str, list[Any]] = {
    "host.kernel": [1, 3],
    "host.widths": [[4, 8, 16], [3, 4, 6]],
    "data.transform": ["none", "shuffled"],
    "training.lr": [0.01, 0.03],
    "training.lr_schedule": ["constant", "cosine"],
    "objective.price": [0.05, 0.5],
}


class Varied(Task):
    """Digits in one transform, as a task of its own."""

    def __init__(self, transform: str) -> None:
        self.transform = transform

    def load(self) -> TaskData:
        return make_variants(Digits(validation=100, test=100).load(), [self.transform])


def family(**facts: list[Any]) -> FamilyConfig:
    return FamilyConfig(train=[facts])


def host_of(pool: HostPool, seed: int) -> list[Tensor]:
    """Return everything observable in one host's episode under random actions, next to another host."""
    seen: list[Tensor] = [pool.reset([seed, seed + 2]).features[0].clone()]
    controller = RandomValid(3)
    controller.reset(pool)
    for _ in range(pool.horizon):
        step = pool.step(controller.act(pool))
        seen += [step.observation.features[0].clone(), step.metrics.objective[0], step.reward[0]]
    return [
        *seen,
        pool.test_scores()[1][0],
        *(weights.clone() for weights in pool.envs[0].network.state_dict().values()),
    ]


@pytest.mark.slow
def test_every_combination_of_values_is_a_context_drawn_by_the_rng_seed_alone() -> None:
    config = FamilyConfig(train=[FACTS, {"host.kernel": [5]}], held_out=[{"host.kernel": [7], "training.lr": [0.1]}])
    whole, held_out = ContextDistribution(config), ContextDistribution(config, held_out=True)

    assert len(whole.contexts) == 2**6 + 1 and len(held_out.contexts) == 1
    drawn = [str(whole.draw(seed)) for seed in range(2000)]
    counts = [drawn.count(str(member)) for member in whole.contexts]
    assert min(counts) > 10 and max(counts) < 60  # 31 on average
    assert drawn == [str(ContextDistribution(config).draw(seed)) for seed in range(2000)]
    assert dict(held_out.draw(3).variables) == {"host.kernel": 7, "training.lr": 0.1}


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "threads"], {"loop"}))
def test_a_host_of_a_family_is_that_of_a_pool_that_is_configured_like_it(executor: str) -> None:
    config = replace(SMALL, executor=executor, horizon=4)
    varied = replace(config, family=family(**FACTS))
    task = Digits(validation=100, test=100)
    pool = HostPool(task, task.load(), cnn, config=varied, n_envs=2, device=torch.device("cpu"))
    kinds = set()
    for seed in (0, 4, 10, 16):
        ours = host_of(pool, seed)
        facts = dict(pool.envs[0].context.context.variables)
        kinds.add(str(pool.envs[0].context.context))
        plain = replace(
            config,
            training=replace(config.training, lr=facts["training.lr"], lr_schedule=facts["training.lr_schedule"]),
            objective=ObjectiveConfig(price=facts["objective.price"]),
        )
        host = partial(cnn, kernel=facts["host.kernel"], widths=facts["host.widths"])
        alone = Varied(facts["data.transform"])
        theirs = host_of(HostPool(alone, alone.load(), host, config=plain, n_envs=2, device=torch.device("cpu")), seed)
        assert same(ours, theirs), f"a host with {pool.envs[0].context.context} is not itself in a family"
    assert len(kinds) == 4


def test_stacks_of_several_kinds_of_hosts_learn_what_the_hosts_learn_alone(make_pool: MakePool) -> None:
    facts = FACTS | {"fail.conv_light": [0.0, 1.0]}
    pools = [
        make_pool(6, host=cnn, executor=executor, family=family(**facts), training=HostTraining(batches=2, lr=1e-3))
        for executor in ("loop", "fused")
    ]
    controllers = [RandomValid(1), RandomValid(1)]
    for pool, controller in zip(pools, controllers, strict=True):
        pool.reset(range(6))
        controller.reset(pool)
    assert len({env.architecture for env in pools[0].envs}) > 2
    assert len({env.context.variant_index for env in pools[0].envs}) > 1
    for _ in range(4):
        loop, fused = (pool.step(controller.act(pool)) for pool, controller in zip(pools, controllers, strict=True))
        # On some processors the rounding of the executors has grown to .011 here.
        torch.testing.assert_close(fused.metrics.loss, loss := loop.metrics.loss, rtol=1e-2, atol=1e-2)
        assert loss.isfinite().all()
    # Three of 100 images, the difference on some processors; in float32 it is a little above .03.
    torch.testing.assert_close(pools[1].test_scores()[1], pools[0].test_scores()[1], rtol=0.0, atol=0.03 + 1e-6)


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_a_dead_seed_gets_no_gradient_and_all_others_do(make_pool: MakePool, executor: str) -> None:
    config = FamilyConfig(train=[{"fail.conv_small": [1.0]}])
    pool = make_pool(2, host=cnn, executor=executor, family=config)
    space = pool.space
    small, light = space.blueprint.index("conv_small"), space.blueprint.index("conv_light")
    pool.reset([0, 2])
    pool.step(act(germinate(0, small), germinate(0, light)))
    dead, alive = (env.slots[0] for env in pool.envs)
    before = [parameter.clone() for parameter in dead.seed.parameters()]
    pool.step(act(WAIT, WAIT))

    assert all(torch.equal(old, new) for old, new in zip(before, dead.seed.parameters(), strict=True))
    assert all(parameter.any() for parameter in alive.seed.parameters())
    dead_record, alive_record = (env.records[0] for env in pool.envs)
    assert dead_record.gradient.norm == 0.0 and dead_record.gradient.vanished == 1.0
    assert alive_record.gradient.norm > 0.0
    # Without a gradient, the gate before blending keeps the seed in TRAINING.
    assert (dead.stage, alive.stage) == (Stage.TRAINING, Stage.BLENDING)


def test_which_grafts_fail_is_drawn_from_the_seed_for_each_slot_and_blueprint() -> None:
    some, none, every = (Context((("fail", chance),)) for chance in (0.3, 0.0, 1.0))
    drawn = [some.seed_fails(seed, slot, kind) for seed in range(500) for slot in "ab" for kind in "xy"]
    assert 0.25 < sum(drawn) / len(drawn) < 0.35
    assert not any(none.seed_fails(seed, "a", "x") for seed in range(100))
    assert all(every.seed_fails(seed, "a", "x") for seed in range(100))
    assert drawn[0::4] != drawn[2::4], "of two slots"


def test_the_critic_may_be_told_what_is_hidden_and_held_out_values_are_unknown_to_it(make_pool: MakePool) -> None:
    config = FamilyConfig(
        train=[{"host.kernel": [1, 3], "fail": [0.5], "training.lr": [0.02]}], held_out=[{"host.kernel": [5]}]
    )
    pool = make_pool(8, host=cnn, family=config)
    pool.reset(range(8))
    facts = len(pool.space.slot) * len(pool.space.blueprint)

    assert pool.privileged.shape == (8, 2 + facts)  # the learning rate is the same for all: not encoded
    for env, told in zip(pool.envs, pool.privileged.tolist(), strict=True):
        kernel = dict(env.context.context.variables)["host.kernel"]
        assert told[:2] == [float(kernel == 1), float(kernel == 3)]
        pairs = [(slot, kind) for slot in pool.space.slot for kind in pool.space.blueprint]
        assert told[2:] == [float(env.context.context.seed_fails(env.rng_seed, *pair)) for pair in pairs]
    task = Digits(validation=100, test=100)
    other = HostPool(task, task.load(), cnn, config=pool.config, n_envs=2, device=torch.device("cpu"), held_out=True)
    assert other.privileged.shape == (2, 2 + facts) and not other.privileged[:, :2].any()
    assert {kernel for env in other.envs for kernel in env.context.context.architecture.values()} == {5}
    assert make_pool(1, host=cnn).privileged is None


def test_an_episode_of_a_family_goes_on_where_it_was_saved(make_pool: MakePool) -> None:
    config = family(**FACTS, fail=[0.5])
    pools = [make_pool(4, host=cnn, family=config) for _ in range(2)]
    first, second = pools
    controller = RandomValid(5)
    first.reset([8, 10, 12, 14])
    controller.reset(first)
    for _ in range(3):
        first.step(controller.act(first))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.privileged, second.privileged)
    for _ in range(3):
        action = controller.act(first)
        ours, theirs = first.step(action), second.step(action)
        for a, b in zip((*ours.observation, *ours.metrics), (*theirs.observation, *theirs.metrics), strict=True):
            assert torch.equal(a, b)


SHORT, LONG = 3, 5


@pytest.fixture
def uneven(make_pool: MakePool) -> HostPool:
    """A host with an episode of three ticks beside one of five."""
    pool = make_pool(2, horizon=LONG, family=family(horizon=[SHORT, LONG]))
    drawn = [pool.env_factory.context_distribution.draw(seed).horizon for seed in range(99)]
    pool.reset([drawn.index(SHORT), drawn.index(LONG)])
    return pool


def test_a_shorter_episode_is_that_of_a_pool_with_its_horizon_and_then_idle(
    uneven: HostPool, make_pool: MakePool
) -> None:
    alone, again = make_pool(2, horizon=SHORT), make_pool(2, horizon=LONG, family=uneven.config.family)
    alone.reset([env.rng_seed for env in uneven.envs])
    actions = [act(germinate(0), WAIT), act(WAIT, germinate(1)), *[act(WAIT, WAIT)] * 3]
    for tick, action in enumerate(actions[:SHORT]):
        ours, theirs = uneven.step(action), alone.step(action)
        assert ours.truncated.tolist() == [tick == SHORT - 1, False]
        for a, b in zip((*ours.observation, *ours.metrics), (*theirs.observation, *theirs.metrics), strict=True):
            assert torch.equal(a[0], b[0])
    weights = [part.clone() for part in uneven.envs[0].network.state_dict().values()]
    again.load_state_dict(uneven.state_dict())
    for action in actions[SHORT:]:
        idle, resumed = uneven.step(action), again.step(action)
        assert uneven.masks.ended.tolist() == [True, False] and idle.reward[0] == 0.0 and idle.truncated[0]
        assert idle.observation.features.isfinite().all()
        assert torch.equal(idle.observation.features, resumed.observation.features)

    assert [env.growing.horizon for env in uneven.envs] == [SHORT, LONG]
    assert [env.tick for env in uneven.envs] == [LONG, LONG] and not uneven.envs[0].stopped
    assert all(map(torch.equal, weights, uneven.envs[0].network.state_dict().values()))
    assert torch.equal(uneven.test_scores()[1][0], alone.test_scores()[1][0])
    uneven.reset([env.rng_seed for env in reversed(uneven.envs)])
    assert [env.growing.horizon for env in uneven.envs] == [LONG, SHORT], "hosts that are used again"


def test_nothing_is_learned_from_the_ticks_behind_a_shorter_episode(
    uneven: HostPool, make_policy: Callable[..., Policy]
) -> None:
    norm, values = RunningMeanStd((uneven.observation.features.shape[-1],)), RunningMeanStd((), clip=float("inf"))
    drawn = uneven.env_factory.context_distribution.draw
    run = next(
        run for run in range(99) if len({drawn(seed) for seed in episode_rng_seeds(run, TRAINING, 0, n_envs=2)}) == 2
    )
    collector = RolloutCollector(
        uneven, make_policy(uneven), observation_norm=norm, value_norm=values, config=PPOConfig(), run_rng_seed=run
    )
    collector.reset()
    for _ in range(uneven.horizon):
        collector.step()
    rollout, _ = collector.finish()

    steps = sum(env.horizon for env in uneven.envs)
    assert steps == SHORT + LONG, "the run's RNG seed draws both"
    assert norm.count == steps * len(uneven.space.slot) and values.count == steps
    short = next(i for i, env in enumerate(uneven.envs) if env.horizon == SHORT)
    assert rollout.steps.masks.forced[SHORT:, short].all() and not rollout.steps.masks.forced[:SHORT, short].all()
