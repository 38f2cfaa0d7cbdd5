import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.measurements import EpochResult, LossAndScore, TrainingStats, Validation
from esper_lightning.growth.gates import GradientStats, LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import iter_tensors
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.envs.executors.episodes import same
from tests.runs import differences
from tests.tiers import rest_is_slow

CALM = GradientStats(norm=1.0, rms=0.1, vanished=0.0, exploded=0.0)


def nothing_new(env: HostEnv) -> EpochResult:
    """Return an epoch result in which all seeds are healthy and contribute nothing."""
    slots, score = len(env.slots), LossAndScore(1.0, 0.5)
    return EpochResult(TrainingStats(1.0, 0.5, 0, CALM, [CALM] * slots), Validation(score, [score] * slots, score))


def trajectory(pool: HostPool, seed: int, wanderer: int) -> list[Tensor]:
    """Play an episode and return everything observable."""
    controller = RandomValid(wanderer)
    seen = [pool.reset([seed]).features.clone()]
    for _ in range(pool.config.horizon):
        step = pool.step(controller.act(pool))
        seen += [step.observation.features.clone(), step.reward]
    return seen + [weights.clone() for weights in pool.envs[0].network.state_dict().values()]


def momenta(env: HostEnv, group: str) -> list[Tensor]:
    parameters = next(g["params"] for g in env.optimizer.param_groups if g["name"] == group)
    return [value.clone() for p in parameters for value in env.optimizer.state[p].values()]


SCRIPT = [  # actions of two environments, tick by tick
    [germinate(0, 2), WAIT],
    [WAIT, germinate(1, tempo=1)],
    [germinate(1, 1, tempo=1), germinate(0, 1, tempo=1)],
    [fossilize(0), cull(1)],
    [germinate(2), WAIT],
    [WAIT, germinate(1, 2)],
    [cull(2), fossilize(0)],
]


@pytest.mark.parametrize("optimizer", rest_is_slow(["adam", "sgd"], {"adam"}))
def test_an_episode_that_is_saved_at_any_tick_continues_bit_for_bit(
    make_pool: Callable[..., HostPool], optimizer: str
) -> None:
    training = HostTraining(optimizer=optimizer, batches=2)
    pool, other = (make_pool(2, horizon=len(SCRIPT), training=training) for _ in range(2))
    pool.reset([1, 2])
    stages = set()
    for rows in SCRIPT:
        stages |= {slot.stage for env in pool.envs for slot in env.slots}
        torch.save(pool.state_dict(), file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert len({tensor.untyped_storage().data_ptr() for tensor in iter_tensors(state["envs"][0])}) < 6
        other.load_state_dict(state)
        other.step(act(WAIT, WAIT))  # training in between must not change the saved state
        other.load_state_dict(state)
        for ours, theirs in zip(pool.step(act(*rows)), other.step(act(*rows)), strict=True):
            assert differences(ours, theirs) == []
        assert differences(pool.state_dict(), other.state_dict()) == []
    # The script passes through every state that a seed can have between two ticks.
    assert stages == set(Stage) - {Stage.GERMINATED, Stage.CULLED}
    for env in other.envs:  # a resumed host holds no memory besides its own
        moments = [value for state in env.optimizer.state.values() for value in state.values()]
        own = [*moments, *env.network.parameters(), *env.network.buffers()]
        assert moments and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_an_episode_in_a_used_environment_is_that_of_a_new_one(
    make_pool: Callable[..., HostPool], optimizer: str
) -> None:
    training = HostTraining(optimizer=optimizer, batches=2, weight_decay=0.01)
    pool = make_pool(1, training=training)
    first = trajectory(pool, seed=5, wanderer=3)
    other = trajectory(pool, seed=6, wanderer=4)
    again = trajectory(pool, seed=5, wanderer=3)

    assert any(slot.occupied for slot in pool.envs[0].slots), "the episode should grow something"
    assert same(first, again)
    assert same(first, trajectory(make_pool(1, training=training), seed=5, wanderer=3))
    assert not same(first[:1], other[:1]), "another seed is another host"


def test_a_tick_goes_over_the_data_without_repetition_until_all_were_seen(make_pool: Callable[..., HostPool]) -> None:
    env = make_pool(1, training=HostTraining(batch_size=32, batches=None)).envs[0]
    batches = env.draw_batches(samples=100).indices
    assert batches.shape == (3, 32)  # the incomplete last batch is dropped
    assert len(set(batches.flatten().tolist())) == 96
    assert set(batches.flatten().tolist()) <= set(range(100))
    assert not torch.equal(batches, env.draw_batches(100).indices), "the next tick has another order"

    order = make_pool(1, training=HostTraining(batch_size=8, batches=7)).envs[0].draw_batches(samples=20).indices
    first, second, rest = order.flatten().split(20)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(20)) and len(set(rest.tolist())) == 16
    assert not torch.equal(first, second)


def test_the_host_and_other_seeds_keep_their_momentum_through_germination_and_cull(
    make_pool: Callable[..., HostPool],
) -> None:
    pool = make_pool(1)
    env = pool.envs[0]
    env.apply(germinate(0, 1))
    pool.executor.train_epoch(pool.envs, pool.data.train)
    host, neighbour = momenta(env, "host"), momenta(env, "seed.block1.pool")
    assert any(value.any() for value in host)

    env.apply(germinate(2, 2))
    assert same(momenta(env, "host"), host) and same(momenta(env, "seed.block1.pool"), neighbour)
    env.finish_step(nothing_new(env), judged=False)  # old enough to be culled
    env.apply(cull(2))
    assert same(momenta(env, "host"), host) and same(momenta(env, "seed.block1.pool"), neighbour)
    assert len(env.optimizer.state) == sum(len(group["params"]) for group in env.optimizer.param_groups)


def test_contributions_are_those_of_the_last_two_ticks_in_which_the_seed_was_blended(
    make_pool: Callable[..., HostPool],
) -> None:
    env = make_pool(1, lifecycle=LifecycleConfig(training_ticks=0, auto_cull=False)).envs[0]
    env.apply(germinate(1))
    known = []
    for without in (0.1, 0.4, 0.55):
        whole, *rest, committed = (LossAndScore(1.0, score) for score in (0.5, 0.9, without, 0.9, 0.3))
        env.finish_step(nothing_new(env)._replace(validation=Validation(whole, rest, committed)), judged=False)
        known.append((env.records[1].previous_contribution, env.records[1].contribution))

    assert known[0] == (None, None)  # not blended, so nothing was measured
    assert known[1] == (None, pytest.approx(10.0))
    assert known[2] == (pytest.approx(10.0), pytest.approx(-5.0))
    assert env.records[0].contribution is None


def test_learning_rates_fall_as_those_of_pytorchs_cosine_over_the_episode(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, training=HostTraining(lr=0.02, lr_schedule="cosine", batches=1))
    env, alone = pool.envs[0], torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(alone, T_max=pool.horizon)
    pool.reset([0])
    for tick in range(pool.horizon):
        assert env.lr_share == pytest.approx(alone.param_groups[0]["lr"] / 0.02)
        pool.step(act(germinate(0) if tick == 2 else WAIT))
        # The rates of this epoch were those before the step; those of the next one are set by now.
        alone.step()
        schedule.step()
        rates = {group["name"]: group["lr"] for group in env.optimizer.param_groups}
        (rate,) = schedule.get_last_lr()
        assert rates == pytest.approx(dict.fromkeys(rates, rate))
    assert "seed.block1.pool" in rates and rates["host"] == pytest.approx(0.0, abs=1e-9)
    pool.reset([0])
    assert env.optimizer.param_groups[0]["lr"] == 0.02


MakePool = Callable[..., HostPool]


def test_a_seed_that_begins_to_blend_keeps_its_momentum(make_pool: MakePool) -> None:
    """F21: the step from TRAINING to BLENDING keeps memory and values of the seed's momentum buffers."""
    pool = make_pool(1, training=HostTraining(optimizer="sgd", batches=2))
    env, slot = pool.envs[0], pool.envs[0].slots[0]
    learned: list[Tensor] = []

    def momenta() -> list[Tensor]:
        return [env.optimizer.state[p]["momentum_buffer"] for p in slot.seed.parameters()]

    def remember(*_: object) -> None:
        learned[:] = [momentum.clone() for momentum in momenta()]

    pool.step(act(germinate(0, 1)))
    assert slot.stage is Stage.TRAINING
    before = momenta()
    env.optimizer.register_step_post_hook(remember)
    pool.step(act(WAIT))

    assert slot.stage is Stage.BLENDING
    assert all(now is then for now, then in zip(momenta(), before, strict=True))
    assert all(now.any() and torch.equal(now, then) for now, then in zip(momenta(), learned, strict=True))
