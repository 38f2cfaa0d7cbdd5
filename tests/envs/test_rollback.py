"""A host that diverges goes on from its last good state, and the others do not notice."""

import io
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import Action, HostPool, Op, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measured import Validated
from esper_lightning.envs.training import HostTraining
from esper_lightning.governor import Decision
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.optimizer import group_names
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import objective
from esper_lightning.tamiyo.baselines import RandomValid
from esper_lightning.tasks import Split
from tests.decisions import WAIT, act, cull, decide, fossilize, germinate
from tests.envs.breaking import CALM, UNWATCHED, breaking
from tests.envs.execution.fused.hosts import make
from tests.envs.execution.fused.hosts import precision as precision_of
from tests.runs import differences

MakePool = Callable[..., HostPool]

HORIZON = 9


def wander(pool: HostPool, choices: list[random.Random]) -> Action:
    """Every environment acts on its own random numbers, whatever the others do."""
    rows = []
    for masks, choice in zip(pool.masks.slot.tolist(), choices, strict=True):
        op, slot = choice.choice([(op, k) for op, row in enumerate(masks) for k, may in enumerate(row) if may])
        blueprint, tempo = (choice.randrange(len(each)) for each in (pool.space.blueprint, pool.space.tempo))
        rows.append(decide(Op(op), slot=slot, blueprint=blueprint, tempo=tempo))
    return act(*rows)


class Waits(random.Random):
    """Takes the first of all possibilities."""

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[0]


class Episode:
    """An episode under random decisions, and all that can be known of it: `rows[tick][host]`.

    Args:
        pool: Is reset.
        seed: Decides hosts and decisions.
    """

    def __init__(self, pool: HostPool, seed: int) -> None:
        self.pool = pool
        self.choices = [random.Random(seed + i) for i in range(pool.n_envs)]
        self.rows: list[list[list[Tensor]]] = []
        self.verdicts: list[list[Decision]] = []
        pool.reset([seed + i for i in range(pool.n_envs)])

    def play(self, ticks: int) -> "Episode":
        """So many more ticks."""
        for _ in range(ticks):
            step = self.pool.step(wander(self.pool, self.choices))
            parts = (*step.observation, step.reward, step.terminated, step.truncated, *step.masks, *step.metrics)
            weights = [list(env.network.state_dict().values()) for env in self.pool.envs]
            self.rows.append([[t.clone() for t in (*(p[i] for p in parts), *w)] for i, w in enumerate(weights)])
            self.verdicts.append([(word.host, word.verdict.decision) for word in step.verdicts])
        return self

    def play_broken(self, *hosts: int) -> "Episode":
        """One more tick, in which the training of these hosts fails."""
        with breaking(self.pool, hosts):
            return self.play(1)

    def of(self, host: int) -> list[list[Tensor]]:
        return [row[host] for row in self.rows]

    def elsewhere(self, pool: HostPool) -> "Episode":
        """What may follow, in a pool that is where this one is."""
        other = copy(self)
        other.pool, other.choices, other.rows, other.verdicts = pool, deepcopy(self.choices), [], []
        return other


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[HostEnv, dict[str, Any]]:
    """What each host's state was when its last snapshot was taken."""
    states: dict[HostEnv, dict[str, Any]] = {}
    keep = HostEnv.keep

    def watched(env: HostEnv) -> None:
        keep(env)
        states[env] = deepcopy(env.state_dict())

    monkeypatch.setattr(HostEnv, "keep", watched)
    return states


def restored_by_hand(pool: HostPool, state: dict[str, Any], host: int, good: dict[str, Any]) -> HostPool:
    """`pool`, in which nobody watches, with the hosts of `state` but for one, which has the state `good` without what
    was alive in it."""
    pool.load_state_dict(state)
    env, tick = pool.envs[host], pool.envs[host].tick
    env.load_state_dict(good)
    env.growing.cull_live("by hand")
    env.tick = tick
    ((loss, accuracy),) = pool.executor.validate([env], pool.data.validation).tolist()
    env.validated = Validated(loss, accuracy)
    env.history.loss.append(loss[0])
    env.history.accuracy.append(accuracy[0])
    parameters = 390 + sum(p.numel() for slot in env.slots for p in slot.seed.parameters())
    price = pool.config.objective
    env.objective = objective(torch.tensor([accuracy[0]]), torch.tensor([parameters]), 390, price).item()
    pool.load_state_dict(deepcopy(pool.state_dict()))  # brings observation and masks up to date
    return pool


def hosts_of(pool: HostPool) -> Iterator[dict[str, Any]]:
    """Their states, but for what the Governor thinks of them."""
    for env in pool.envs:
        state = env.state_dict()
        del state["guard"]
        yield state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_a_rolled_back_host_goes_on_as_one_that_was_restored_by_hand(
    make_pool: MakePool, kept: dict[HostEnv, dict[str, Any]], executor: str, optimizer: str, precision: str
) -> None:
    training = HostTraining(batches=2, optimizer=optimizer, precision=precision, weight_decay=0.01)
    settings = {"horizon": HORIZON, "executor": executor, "training": training}
    pool = make_pool(3, governor=CALM, **settings)
    by_hand = make_pool(3, governor=UNWATCHED, **settings)
    drawn = random.Random(f"{executor} {optimizer} {precision}")
    for _ in range(2 if precision == "fp32" else 1):
        seed, tick, host = drawn.randrange(1000), drawn.randrange(2, HORIZON - 2), drawn.randrange(3)
        episode = Episode(pool, seed).play(tick).play_broken(host)
        assert episode.verdicts == [[]] * tick + [[(host, Decision.ROLL_BACK)]]

        restored_by_hand(by_hand, deepcopy(pool.state_dict()), host, kept[pool.envs[host]])
        for ours, theirs in zip((*pool.observation, *pool.masks), (*by_hand.observation, *by_hand.masks), strict=True):
            assert torch.equal(ours, theirs)
        assert differences(list(hosts_of(pool)), list(hosts_of(by_hand))) == []

        other = episode.elsewhere(by_hand).play(HORIZON - tick - 1)
        episode.play(HORIZON - tick - 1)
        assert differences(episode.rows[tick + 1 :], other.rows) == []
        assert differences(list(hosts_of(pool)), list(hosts_of(by_hand))) == []


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_the_neighbours_of_a_rolled_back_host_do_not_notice(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(3, governor=CALM, horizon=HORIZON, executor=executor)
    drawn = random.Random(executor)
    for _ in range(2):
        seed, tick, host = drawn.randrange(1000), drawn.randrange(HORIZON), drawn.randrange(3)
        broken = Episode(pool, seed).play(tick).play_broken(host).play(HORIZON - tick - 1)
        states = deepcopy(pool.state_dict()["envs"])
        whole = Episode(pool, seed).play(HORIZON)

        assert len(broken.verdicts[tick]) == 1 and not any(whole.verdicts)
        for i, env in enumerate(pool.envs):
            if i != host:
                assert differences(broken.of(i), whole.of(i)) == []
                assert differences(states[i], env.state_dict()) == [], "its snapshot, too"
        assert differences(broken.of(host)[:tick], whole.of(host)[:tick]) == []
        assert differences(broken.of(host)[tick:], whole.of(host)[tick:]) != []


def test_in_a_stack_the_neighbours_do_not_notice_while_the_same_seeds_are_stacked(make_pool: MakePool) -> None:
    pool = make_pool(3, governor=CALM, horizon=HORIZON, executor="fused")
    for tick, host in ((0, 1), (4, 0), (7, 2)):
        episodes = []
        for broken in ([host], []):
            episode = Episode(pool, 50 + tick)
            episode.choices[host] = Waits()  # then there is no seed to lose
            episodes.append(episode.play(tick).play_broken(*broken).play(HORIZON - tick - 1))

        assert [len(words) for words in episodes[0].verdicts] == [int(t == tick) for t in range(HORIZON)]
        for i in {0, 1, 2} - {host}:
            assert differences(episodes[0].of(i), episodes[1].of(i)) == []


@pytest.mark.parametrize("seed", range(2))
def test_in_a_stack_the_neighbours_notice_nothing_but_rounding(seed: int) -> None:
    training = HostTraining(batches=2, batch_size=16, optimizer="sgd", lr=0.05)
    pool = make("fused", "cnn", 3, horizon=HORIZON, governor=CALM, training=training)
    host, tick = seed, 3 + seed
    with precision_of(torch.float64):
        broken = Episode(pool, 7 + seed).play(tick).play_broken(host).play(HORIZON - tick - 1)
        whole = Episode(pool, 7 + seed).play(HORIZON)

    for i in {0, 1, 2} - {host}:
        # The very tick in which a neighbour is nothing but NaN leaves no trace at all.
        assert differences(broken.of(i)[: tick + 1], whole.of(i)[: tick + 1]) == []
        for ours, theirs in zip(broken.of(i), whole.of(i), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 if a.dtype == torch.float64 else 1e-6)


@pytest.fixture
def rare(make_pool: MakePool) -> HostPool:
    """A pool whose hosts are kept when they are fossilized, and hardly else."""
    return make_pool(2, governor=replace(CALM, snapshot_every=1000), horizon=12)


def fossil(pool: HostPool) -> StepResult:
    """Host 0 grows a seed and keeps it, in the fourth tick, and that tick's training goes wrong; host 1 waits."""
    pool.reset([3, 4])
    pool.step(act(germinate(0, 1), WAIT))
    for _ in range(2):
        pool.step(act(WAIT, WAIT))
    with breaking(pool, [0]):
        return pool.step(act(fossilize(0), WAIT))


def test_what_is_kept_for_good_survives_a_rollback_in_the_very_same_tick(rare: HostPool) -> None:
    rare.reset([3, 4])
    rare.step(act(germinate(0, 1), WAIT))
    for _ in range(2):
        rare.step(act(WAIT, WAIT))
    before = deepcopy(rare.envs[0].network.state_dict())
    assert rare.envs[0].slots[0].stage is Stage.PROBATIONARY
    step = fossil(rare)

    env = rare.envs[0]
    assert [word.verdict.decision for word in step.verdicts] == [Decision.ROLL_BACK]
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(dict(before), dict(env.network.state_dict())) == []
    assert step.metrics.parameters[0] == 390 + sum(p.numel() for p in env.slots[0].seed.parameters())
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    for _ in range(5):
        step = rare.step(act(WAIT, WAIT))
    with breaking(rare, [0]):
        rare.step(act(WAIT, WAIT))
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(dict(before), dict(env.network.state_dict())) == [], "the same snapshot serves again"


def test_what_was_alive_is_culled_and_its_slot_opens_again(rare: HostPool) -> None:
    fossil(rare)
    env = rare.envs[0]
    rare.step(act(germinate(1, 1), germinate(1, 1)))
    rare.step(act(germinate(2), WAIT))
    env.keep()  # now there are live seeds in the snapshot
    with breaking(rare, [0]):
        step = rare.step(act(WAIT, WAIT))

    assert [
        (event.host, event.tick, event.seed.slot, event.seed.after, event.seed.cause)
        for event in step.events
        if event.host == 0
    ] == [
        (0, 7, "block2.pool", Stage.CULLED, "rolled back"),
        (0, 7, "block3", Stage.CULLED, "rolled back"),
    ]
    assert [slot.stage for slot in env.slots] == [Stage.FOSSILIZED, Stage.CULLED, Stage.CULLED]
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    assert set(env.optimizer.state) == set(env.network.parameters()), "nothing is known of what is gone"
    assert not rare.masks.slot[0, Op.GERMINATE].any()
    assert rare.envs[1].slots[1].live, "a neighbour's is left alone"
    for _ in range(2):
        rare.step(act(WAIT, WAIT))
    assert rare.masks.slot[0, Op.GERMINATE].tolist() == [False, True, True]


def plain_accuracy(network: nn.Module, data: Split, without: Sequence[str] = ()) -> float:
    """By a plain forward pass of a copy, without the seeds in some slots."""
    network = deepcopy(network).eval()
    for name in without:
        slots_of(network)[name].empty()
    return (network(data.inputs).argmax(-1) == data.targets).float().mean().item()


def worth(pool: HostPool, host: int, committed: bool = False) -> float:
    """J of one host, of its weights alone; with all seeds in it or with those that are kept."""
    env = pool.envs[host]
    kept = [slot for slot in env.slots if slot.stage is Stage.FOSSILIZED]
    gone = [slot.name for slot in env.slots if slot not in kept] if committed else []
    accuracy = plain_accuracy(env.network, pool.data.validation, gone)
    parameters = 390 + sum(p.numel() for slot in kept for p in slot.seed.parameters())
    return objective(torch.tensor([accuracy]), torch.tensor([parameters]), 390, pool.config.objective).item()


def test_a_rollback_costs_the_penalty_and_ends_the_trajectory_there(rare: HostPool) -> None:
    step = fossil(rare)

    assert step.reward.tolist()[0] == step.metrics.reward.tolist()[0] == -0.75
    assert step.terminated.tolist() == rare.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, False]
    assert step.metrics.objective[0].item() == pytest.approx(worth(rare, 0))
    (word,) = step.verdicts
    assert str(word) == "host 0 (seed 3) rolled back at tick 4, to tick 3: loss is nan"
    named = dict(zip(rare.feature_names, step.observation.features[0].tolist(), strict=True))
    assert named["progress"] == pytest.approx(4 / 12)
    assert named["share.FOSSILIZED"] == pytest.approx(1 / 3) and named["accuracy.0"] == step.metrics.accuracy[0].item()
    assert step.observation.features.isfinite().all()

    before = worth(rare, 0)
    step = rare.step(act(WAIT, WAIT))
    assert step.terminated.tolist() == [False, False]
    assert step.reward[0].item() == pytest.approx(worth(rare, 0) - before, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_between_two_rollbacks_rewards_sum_to_the_change_of_the_objective(make_pool: MakePool, seed: int) -> None:
    pool = make_pool(2, governor=CALM, horizon=12, training=HostTraining(batches=8))
    wanderer, drawn = RandomValid(seed), random.Random(seed)
    pool.reset([seed, seed + 50])
    begin, total = [worth(pool, i) for i in range(2)], [0.0, 0.0]
    broken = [sorted(drawn.sample(range(12), 2)) for _ in range(2)]
    rollbacks = 0
    for tick in range(12):
        with breaking(pool, [i for i in range(2) if tick in broken[i]]):
            step = pool.step(wanderer.act(pool))
        for i in range(2):
            now = step.metrics.objective[i].item()
            if step.terminated[i] or tick == 11:  # nothing moves on by itself: what was measured is what is there
                assert now == pytest.approx(worth(pool, i, committed=tick == 11), abs=1e-6)
            if step.terminated[i]:
                rollbacks += 1
                begin[i], total[i] = now, 0.0
                assert step.reward[i] == -0.75
            else:
                total[i] += step.reward[i].item()
                assert total[i] == pytest.approx(now - begin[i], abs=1e-5)
    assert rollbacks == 4


def test_a_rolled_back_host_may_learn_more_slowly_from_then_on(
    make_pool: MakePool, kept: dict[HostEnv, dict[str, Any]]
) -> None:
    fast, slow = (HostTraining(batches=2, optimizer="adamw", lr=lr) for lr in (0.02, 0.01))
    pool = make_pool(2, governor=replace(CALM, lr_factor=0.5), horizon=HORIZON, training=fast)
    by_hand = make_pool(2, governor=UNWATCHED, horizon=HORIZON, training=slow)
    episode = Episode(pool, 7).play(4).play_broken(0)
    restored_by_hand(by_hand, deepcopy(pool.state_dict()), 0, kept[pool.envs[0]])
    other = episode.elsewhere(by_hand).play(2)
    episode.play(2)

    assert differences(episode.of(0)[5:], other.of(0)) == [], "as a host whose learning rate is half as high"
    assert {group["lr"] for group in pool.envs[1].optimizer.param_groups} == {0.02}
    episode.play_broken(0)
    assert {group["lr"] for group in pool.envs[0].optimizer.param_groups} == {0.005}
    state = deepcopy(pool.state_dict())
    pool.reset([1, 2])
    assert {group["lr"] for env in pool.envs for group in env.optimizer.param_groups} == {0.02}
    pool.load_state_dict(state)
    row = [k for k, may in enumerate(pool.masks.slot[0, Op.GERMINATE]) if may][:1]
    pool.step(act(germinate(row[0]) if row else WAIT, WAIT))
    assert {group["lr"] for group in pool.envs[0].optimizer.param_groups} == {0.005}, "that of new seeds, too"


def test_a_rollback_at_the_horizon_ends_the_episode_as_ever(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=CALM, horizon=4)
    for fault in (False, True):
        pool.reset([1, 2])
        pool.step(act(germinate(0, 2), germinate(0, 2)))
        for _ in range(2):
            pool.step(act(WAIT, WAIT))
        with breaking(pool, [0] if fault else []):
            step = pool.step(act(fossilize(0), WAIT))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [True, True]
    assert step.reward[0] == -0.75
    for i in range(2):
        assert step.metrics.objective[i].item() == pytest.approx(worth(pool, i, committed=True))
    with pytest.raises(ValueError, match="the episode is over after 4 ticks"):
        pool.step(act(WAIT, WAIT))
    pool.reset([1, 2])
    assert not pool.terminated.any()


STRICT = replace(CALM, max_rollbacks=1)


def ended(pool: HostPool, seed: int = 5) -> Episode:
    """Host 1 was rolled back in the third tick, and given up in the fifth."""
    return Episode(pool, seed).play(2).play_broken(1).play(1).play_broken(1)


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_a_host_that_diverges_once_too_often_is_restored_and_left_alone(
    make_pool: MakePool, kept: dict[HostEnv, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    pool = make_pool(3, governor=STRICT, horizon=HORIZON, executor=executor)
    episode = ended(pool)
    env = pool.envs[1]
    assert episode.verdicts == [[], [], [(1, Decision.ROLL_BACK)], [], [(1, Decision.END)]]
    assert env.ended and pool.masks.ended.tolist() == [False, True, False]
    assert pool.masks.slot[1].any(-1).nonzero().tolist() == [[Op.WAIT]]
    assert pool.terminated.tolist() == [False, True, False]
    good = kept[env]["growing"]["network"]
    left = {name: value for name, value in env.network.state_dict().items() if name in good}
    assert differences({name: good[name] for name in left}, left) == [], "it is the host of the last snapshot"

    trained: list[HostEnv] = []
    train = pool.executor.train_epoch

    def watched(envs: Sequence[HostEnv], data: Split) -> Tensor:
        trained.extend(envs)
        return train(envs, data)

    monkeypatch.setattr(pool.executor, "train_epoch", watched)
    before, weights = deepcopy(env.state_dict()), env.guard.snapshot.copy()
    accuracy = plain_accuracy(env.network, pool.data.validation)
    for tick in range(6, HORIZON + 1):
        step = pool.step(wander(pool, episode.choices))
        assert (step.reward[1], step.terminated[1], step.truncated[1]) == (0.0, False, tick == HORIZON)
        assert step.metrics.accuracy[1].item() == pytest.approx(accuracy)
        assert not [word for word in step.verdicts if word.host == 1]
        assert not [event for event in step.events if event.host == 1]
    assert env not in trained and len(trained) == 2 * (HORIZON - 5)
    assert differences(before | {"tick": HORIZON, "guard": None}, env.state_dict() | {"guard": None}) == []
    assert differences(weights, env.guard.snapshot.copy()) == [], "not kept again"
    torch.testing.assert_close(
        pool.test(), torch.tensor([plain_accuracy(e.network, pool.data.test, live(e)) for e in pool.envs])
    )
    pool.reset([1, 2, 3])
    assert not pool.masks.ended.any() and pool.masks.slot[1, Op.GERMINATE].all()


def live(env: HostEnv) -> list[str]:
    return [slot.name for slot in env.slots if slot.live]


def test_an_ended_host_can_be_told_to_do_nothing_but_wait(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=replace(CALM, max_rollbacks=0), horizon=4)
    with breaking(pool, [0]):
        pool.step(act(WAIT, WAIT))
    with pytest.raises(ValueError, match=r"host 0: GERMINATE .* is masked"):
        pool.step(act(germinate(0), WAIT))
    pool.step(act(WAIT, germinate(0)))


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_the_others_do_not_notice_that_a_host_has_ended(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(3, governor=STRICT, horizon=HORIZON, executor=executor)
    cut = ended(pool).play(HORIZON - 5)
    whole = Episode(pool, 5).play(HORIZON)

    for i in (0, 2):
        assert differences(cut.of(i), whole.of(i)) == []


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_an_episode_goes_on_to_the_horizon_with_nobody_left_to_train(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    pool = make_pool(2, governor=replace(CALM, max_rollbacks=0), horizon=5, executor=executor)
    first = Episode(pool, 1).play(5)
    episode = Episode(pool, 1).play(1).play_broken(0).play_broken(1)
    with monkeypatch.context() as patch:
        patch.setattr(pool.executor, "tick", None)  # whoever asks it to train fails
        for tick in (4, 5):
            step = pool.step(act(WAIT, WAIT))
            assert step.reward.tolist() == [0.0, 0.0] and step.truncated.tolist() == [tick == 5] * 2
    assert pool.test().isfinite().all()
    assert [words for words in episode.verdicts if words] == [[(0, Decision.END)], [(1, Decision.END)]]

    assert differences(Episode(pool, 1).play(5).rows, first.rows) == [], "the next episode is as any other"


LARGE = replace(CALM, max_loss=50.0, patience=2, max_rollbacks=1)

FAULTS = {2: 0, 3: 0, 5: 1, 7: 0, 8: 0}
"""Whose loss becomes large in which tick: host 0 is rolled back after the fourth and ended after the ninth one, host 1
mends itself."""


def blow_up(env: HostEnv) -> None:
    """Makes its loss large."""
    with torch.no_grad():
        for parameter in env.network.head.parameters():
            parameter.mul_(1e4)


def faulty_tick(pool: HostPool, choices: list[random.Random], tick: int) -> StepResult:
    """One that goes wrong as FAULTS says: for its time the host's weights are others."""
    real, host = pool.executor.tick, FAULTS.get(tick)

    def faulty(*args: Any) -> Any:
        head = list(pool.envs[host].network.head.parameters())
        sound = [parameter.detach().clone() for parameter in head]
        blow_up(pool.envs[host])
        measured = real(*args)
        with torch.no_grad():
            for parameter, value in zip(head, sound, strict=True):
                parameter.copy_(value)
        return measured

    if host is not None:
        pool.executor.tick = faulty
    step = pool.step(wander(pool, choices))
    pool.executor.tick = real
    return step


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_a_watched_episode_that_is_saved_at_any_tick_continues_bit_for_bit(make_pool: MakePool, executor: str) -> None:
    settings = {"governor": LARGE, "horizon": 11, "executor": executor}
    pool, other = make_pool(2, **settings), make_pool(2, **settings)
    pool.reset([1, 2])
    choices = [random.Random(i) for i in range(2)]
    words = []
    for tick in range(11):
        torch.save(pool.state_dict(), file := io.BytesIO())
        file.seek(0)
        if tick % 3 == 1:
            ended(other)  # it was somewhere else
        other.load_state_dict(torch.load(file, weights_only=True))
        ours, theirs = (faulty_tick(each, deepcopy(choices), tick) for each in (pool, other))
        for choice in choices:
            choice.random()

        assert differences(list(map(str, ours.verdicts)), list(map(str, theirs.verdicts))) == []
        for name in ("action", "reward", "terminated", "observation", "masks", "metrics"):
            assert differences(getattr(ours, name), getattr(theirs, name)) == [], name
        assert differences(pool.state_dict(), other.state_dict()) == []
        words += [(word.host, word.tick, word.verdict.decision.name) for word in ours.verdicts]
    assert words == [
        (0, 3, "SUSPICIOUS"),
        (0, 4, "ROLL_BACK"),
        (1, 6, "SUSPICIOUS"),
        (0, 8, "SUSPICIOUS"),
        (0, 9, "END"),
    ]


def test_a_snapshot_is_taken_of_healthy_hosts_alone(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1, governor=replace(LARGE, snapshot_every=3, max_rollbacks=9), horizon=16)
    kept: list[int] = []
    keep = HostEnv.keep
    monkeypatch.setattr(HostEnv, "keep", lambda env: (kept.append(env.tick), keep(env)))
    faults = {4, 8, 9}  # a spike, and a divergence
    pool.reset([1])
    assert kept == [0], "when it is new"
    for tick in range(1, 17):
        monkeypatch.setitem(FAULTS, tick, 0) if tick in faults else monkeypatch.delitem(FAULTS, tick, raising=False)
        faulty_tick(pool, [Waits()], tick)
    # Healthy host epochs are 1, 2, 3; 5, 6, 7 (a spike does not count); after the rollback three more each time.
    assert kept == [0, 3, 7, 12, 15]


def test_to_train_on_after_a_rollback_does_not_touch_the_snapshot(rare: HostPool) -> None:
    fossil(rare)
    env = rare.envs[0]
    before = env.guard.snapshot.copy()
    for decision in (germinate(1, 1), WAIT, WAIT, WAIT):
        rare.step(act(decision, WAIT))

    assert differences(before, env.guard.snapshot.view()) == []
    assert differences(before["growing"]["network"], env.network.state_dict()) != []
    # Nor does the restored host hold more memory than its own.
    values = [value for state in env.optimizer.state.values() for value in state.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in [*values, *env.network.parameters()])


def test_snapshots_lie_in_the_same_memory_from_episode_to_episode(make_pool: MakePool) -> None:
    pool = make_pool(1, governor=replace(CALM, max_rollbacks=99), horizon=5)
    env = pool.envs[0]
    sizes = []
    for episode in range(6):
        pool.reset([episode])
        pool.step(act(germinate(0, 2)))
        for _ in range(3):
            with breaking(pool, [0]):
                pool.step(act(WAIT))
        pool.step(act(WAIT))
        sizes.append((env.guard.snapshot.nbytes, sum(1 for _ in env.optimizer.state)))
    # From the second one on the optimizer knows every weight from the start.
    assert sizes[1:] == [sizes[1]] * 5


def test_what_builds_on_a_suspicious_host_is_refused_and_it_waits_instead(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=CALM, horizon=12)
    for decision in (germinate(0, 1), WAIT, WAIT):
        pool.step(act(decision, decision))
    for decision, forbidden in ((germinate(1, 2), "GERMINATE conv_light"), (fossilize(0), "FOSSILIZE")):
        guard = pool.envs[0].guard
        guard.watch = guard.watch._replace(panic=1)  # as if its last loss had been out of range
        step = pool.step(act(decision, decision))

        (veto,) = step.vetoes
        assert str(veto).startswith(f"host 0: {forbidden}")
        assert str(veto).endswith(f"vetoed at tick {veto.tick}: the loss has been out of range for 1 host epochs")
        assert torch.stack(step.action).T.tolist() == [list(WAIT), list(decision)]
        assert [event.host for event in step.events if event.seed.cause in ("germinate", "fossilize")] == [1]
        assert step.observation.features[0, pool.feature_names.index("last_op.WAIT")] == 1
    assert [slot.stage for env in pool.envs for slot in env.slots[:2]] == [
        Stage.PROBATIONARY, Stage.DORMANT, Stage.FOSSILIZED, Stage.BLENDING,
    ]  # fmt: skip
    guard.watch = guard.watch._replace(panic=1)
    step = pool.step(act(cull(0), WAIT))
    assert step.vetoes == [] and not pool.envs[0].slots[0].occupied


def test_seeds_of_a_suspicious_host_do_not_advance(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=replace(LARGE, patience=9), horizon=12)
    pool.reset([1, 2])
    pool.step(act(germinate(0, 2), germinate(0, 2)))
    blow_up(pool.envs[0])
    stages = []
    for _ in range(2):
        pool.step(act(WAIT, WAIT))
        stages.append([env.slots[0].stage for env in pool.envs])

    assert stages == [[Stage.TRAINING, Stage.BLENDING], [Stage.TRAINING, Stage.PROBATIONARY]]
    assert [env.slots[0].age for env in pool.envs] == [3, 3], "time passes all the same"


def test_a_host_that_would_get_too_large_waits_instead(make_pool: MakePool) -> None:
    pool = make_pool(1, governor=replace(CALM, max_growth=1.2), horizon=12)
    small, large = germinate(0, 1), germinate(1, 2)  # 20 and 592 parameters on 390
    step = pool.step(act(small))
    assert step.vetoes == [] and pool.envs[0].slots[0].occupied
    (veto,) = pool.step(act(large)).vetoes

    assert (veto.host, veto.tick) == (0, 2)
    assert "governor.max_growth = 1.2" in str(veto) and "conv_light" in str(veto)
    assert not pool.envs[0].slots[1].occupied


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_where_nobody_watches_a_broken_host_goes_on_broken(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(2, governor=UNWATCHED, horizon=6, executor=executor)
    episode = Episode(pool, 1).play(2).play_broken(0).play(3)

    assert not any(episode.verdicts)
    assert all(row[-1].isnan().any() or any(t.isnan().any() for t in row) for row in episode.of(0)[2:])
    assert pool.observation.features.isfinite().all() and not pool.terminated.any()
