"""Hosts that grow in depth within a pool: budgets, resuming, rollbacks, and what the policy sees."""

import io
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper_lightning import from_config
from esper_lightning.callbacks import Grow
from esper_lightning.controllers.learned import TrainingHosts, TrainingRules
from esper_lightning.controllers.rules import FossilizedSeed, RandomValid, Scaling, StaticController
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.flops import FlopCounter, plain_operators
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.snapshot import unpack
from esper_lightning.evaluation.checkpoints import load_controller
from esper_lightning.evaluation.play import play_episode, play_static
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.export import load, save
from esper_lightning.growth.gates import NO_GRADIENT, GradientStats
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, Attached
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.tasks import Synthetic
from tests.decisions import WAIT, act, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.envs.episodes import Episode
from tests.envs.executors.episodes import same
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, make, precision
from tests.tiers import rest_is_slow


def make_deep(executor: str = "loop", batches: float | None = None, **settings: object) -> HostPool:
    """Return two GPTs of two blocks that grow to six, reset; `batches`: host epochs of so many minibatches' FLOPs."""
    pool = make("loop", "gpt, depth", 2, actions=FAST_CONFIG.actions)
    training = HostTraining(batches=2, batch_size=16, lr=0.02)
    if batches is not None:
        training = HostTraining(flops=batches * 16 * pool.envs[0].flops.of_step([]), batch_size=16, lr=0.02)
    pool = make(executor, "gpt, depth", 2, training=training, **settings)
    pool.reset([1, 3])
    assert pool.space.slot == ["layer2", "stack1", "stack2"] and "stack" in pool.space.blueprint
    return pool


def depth_slots_of(env: HostEnv) -> list[DepthSlot]:
    return [slot for slot in env.slots if isinstance(slot, DepthSlot)]


def stacked(pool: HostPool, slot: int) -> tuple[int, ...]:
    return germinate(slot, pool.space.blueprint.index("stack"))


def test_a_deeper_host_trains_on_fewer_minibatches_of_the_same_flops() -> None:
    pool = make_deep(batches=10.0)
    counts: list[list[int]] = [[], []]
    for host, env in enumerate(pool.envs):
        env.on_batches = partial(lambda counts, batches: counts.append(len(batches.indices)), counts[host])
    budgets = []
    for rows in (WAIT, WAIT), (stacked(pool, 1),) * 2, (WAIT, stacked(pool, 2)):
        pool.step(act(*rows))
        budgets.append(pool.envs[1].flops_left)

    flops = pool.envs[0].flops
    share = flops.host / (flops.host + 2 * flops.blocks["stack1"])
    assert counts[0][:2] == [10, int(10 * share)] and counts[1][0] == 10 > counts[1][1] > counts[1][2]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] is not None
    assert [slot.stage for slot in pool.envs[0].slots] == [Stage.DORMANT, Stage.FOSSILIZED, Stage.DORMANT]
    assert [len(env.network.blocks) for env in pool.envs] == [4, 6]
    assert [record.contribution for record in pool.envs[1].records] == [None] * 3, "no copy is judged by its absence"


def test_depth_slots_of_one_list_are_offered_in_turn() -> None:
    pool = make_deep()
    for row, offered in (WAIT, ["stack1"]), (stacked(pool, 1), ["stack2"]), (stacked(pool, 2), []):
        pool.step(act(row, WAIT))
        possible = pool.masks_on_cpu.slot[:, Op.GERMINATE, 1:].tolist()
        assert [name for name, may in zip(pool.space.slot[1:], possible[0], strict=True) if may] == offered
        assert possible[1] == [True, False]


@pytest.mark.parametrize("doublings", rest_is_slow([0, 1, 2], {1}))
def test_the_scaling_rule_adds_stacks_as_long_as_the_flops_left_suffice(doublings: int) -> None:
    rule, pool = Scaling(), make_deep(batches=10.0)
    env, block = pool.envs[0], sum(p.numel() for p in pool.envs[0].network.blocks[0].parameters())
    sizes = [env.host_parameters + 2 * blocks * block for blocks in (1, 2)]
    budgets = [pool.config.horizon * env.training.flops / (6 * size**2) for size in sizes]  # tokens per parameter
    rule.targets = [2 * budgets[0], 0.99 * (1 - rule.begin) * budgets[0], budgets[1] / 100][doublings]
    rule.reset(pool)
    first = round(rule.begin * pool.config.horizon)
    for tick in range(pool.config.horizon):
        pool.step(rule.act(pool))
        stacks = [slot.occupied for slot in env.slots[1:]]
        assert sum(stacks) == (min(doublings, tick + 1 - first) if tick >= first else 0)


@pytest.mark.parametrize(("kind", "targets"), [("gpt, depth", 8), ("cnn, depth", 1)])
def test_a_text_has_a_target_for_each_token_and_an_image_one_for_all_pixels(kind: str, targets: int) -> None:
    env = make("loop", kind, 2, training=HostTraining(flops=1e8)).envs[0]
    [positions] = env.flops.positions[depth_slots_of(env)[0].name]

    assert env.flops.targets == targets and env.flops_left is not None
    assert env.targets_per_parameter(100) == pytest.approx(env.flops_left / 6e4 * targets / positions)


def tensors(pool: HostPool) -> list[Tensor]:
    """Return copies of what training changes: weights, statistics and optimizer states of all hosts."""
    found = [x for env in pool.envs for x in env.network.state_dict().values() if x.is_floating_point()]
    states = [env.optimizer.state[p] for env in pool.envs for p in env.network.parameters() if p in env.optimizer.state]
    return [x.clone() for x in (*found, *(state[name] for state in states for name in sorted(state)))]


def play_deep(executor: str, kind: str) -> list[Tensor]:
    """Return all numbers of twenty ticks in which hosts become deeper and are rolled back, and of a second episode,
    in which one is deeper from the first tick on."""
    pool = make(executor, kind, 4, governor=ONLY_NAN_DIVERGES)
    k, seen = next(k for k, slot in enumerate(pool.envs[0].slots) if isinstance(slot, DepthSlot)), list[Tensor]()
    deeper, further = (stacked(pool, slot) for slot in (k, k + 1))
    script = {2: [deeper, WAIT, WAIT, WAIT], 4: [WAIT, deeper, WAIT, WAIT], 6: [further, WAIT, deeper, WAIT]}
    script |= {10: [WAIT, further, WAIT, WAIT], 14: [WAIT, WAIT, WAIT, deeper]}
    for ticks, seeds in ((20, [1, 2, 3, 4]), (2, [5, 6, 7, 8])):
        with precision(torch.float64):
            pool.reset(seeds)
            for tick in range(ticks):
                rows = script.get(tick if ticks == 20 else tick + 14, [WAIT] * 4)
                with breaking_epoch(pool, [0, 3] if tick in (6, 12) else []):
                    step = pool.step(act(*rows))
                seen += [*tensors(pool), *step.metrics, step.observation[0].clone()]
                seen += [torch.tensor([list(stats) for env in pool.envs for stats in gradients(env)])]
        depths = {tuple(len(slot.block_list.blocks) for slot in depth_slots_of(env)) for env in pool.envs}
        assert len(depths) > 1 or ticks < 20, "hosts differ in depth"
    return seen


def gradients(env: HostEnv) -> list[GradientStats]:
    return [env.host_gradient or NO_GRADIENT, *(record.gradient or NO_GRADIENT for record in env.records)]


@pytest.mark.parametrize("kind", rest_is_slow(["gpt, depth", "cnn, depth"], {"cnn, depth"}))
def test_hosts_of_different_depths_learn_the_same_in_every_executor(kind: str) -> None:
    loop, threads, fused = (play_deep(executor, kind) for executor in ("loop", "threads", "fused"))

    for ours, *others in zip(loop, threads, fused, strict=True):
        for theirs in others:
            torch.testing.assert_close(theirs, ours, rtol=1e-7, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("kind", rest_is_slow(["gpt, depth", "cnn, depth"], {"cnn, depth"}))
def test_a_state_is_restored_exactly_at_every_other_depth(kind: str) -> None:
    pool = make("loop", kind, 1, torch.float32)
    pool.reset([1])
    (env,) = pool.envs
    slots, states = [slot.name for slot in depth_slots_of(env)], []
    for name in (None, *slots):
        if name is not None:
            env.growing.germinate(name, "stack")
        pool.train_without_actions(1)
        states.append(env.packed_state())
    for before, after in permutations(states, 2):
        env.load_state_dict(unpack(before))
        env.take_snapshot()
        saved = list(iter_tensors(unpack(after)))
        env.load_state_dict(unpack(after))
        assert same(iter_tensors(env.state_dict()), saved)
        (group,) = env.optimizer.param_groups
        assert [*map(id, group["params"])] == [*map(id, env.network.parameters())]
        assert {*env.optimizer.state} == {*group["params"]}, "of no removed block"
        env.load_state_dict(unpack(before))
        env.take_snapshot()
        for name in slots:
            if env.growing.slots[name].is_open:
                env.growing.germinate(name, "stack")
        env.roll_back(False, "test")
        saved = list(iter_tensors(unpack(before)["growing"]["network"]))
        assert same(iter_tensors(env.network.state_dict()), saved)
        assert {*env.optimizer.state} == {*env.network.parameters()}


@pytest.mark.parametrize("kind", ["gpt, depth", "cnn, depth"])
def test_copies_have_the_optimizer_state_and_flops_of_their_sources(kind: str) -> None:
    env = (pool := make("loop", kind, 1, torch.float32)).envs[0]
    pool.reset([1])
    pool.train_without_actions(2)
    inputs = pool.data.validation.inputs[:1]
    for slot in depth_slots_of(env):
        env.growing.germinate(slot.name, "stack")
        source, grown = slot.block_list.blocks[slot.begin - 1], slot.grown[-1]
        for ours, theirs in zip(grown.parameters(), source.parameters(), strict=True):
            state, of_source = env.optimizer.state[ours], env.optimizer.state[theirs]
            assert of_source and torch.equal(ours, theirs)
            assert all(torch.equal(state[name], x) and state[name] is not x for name, x in of_source.items())
        with FlopCounter() as counter, torch.no_grad(), plain_operators():
            env.network.eval()(inputs)
        assert counter.total == env.flops.with_seeds(env.slots) > env.flops.host
        assert slot.size == slot.seed_parameters("stack")
    (group,) = env.optimizer.param_groups
    assert [*map(id, group["params"])] == [*map(id, env.network.parameters())]
    assert env.fossilized_parameters == sum(parameter.numel() for parameter in env.network.parameters())
    plain = env.growing.state_dict()["network"]
    env.reset(3)
    with pytest.raises(ValueError, match=r"blocks in the state, and [12] by its records"):
        env.network.load_state_dict({k: v for k, v in plain.items() if not k.startswith("stacks.")}, strict=False)


def test_a_grown_host_is_saved_and_loaded_and_a_state_of_two_depths_is_refused(tmp_path: Path) -> None:
    def host() -> GPT:
        return build_on(torch.device("cpu"), partial(HOSTS["gpt, depth"], (8,), 9), torch.Generator().manual_seed(1))

    grown, fresh, tokens = host(), host(), torch.arange(16).view(2, 8) % 9
    growing = GrowingNetwork(grown, torch.optim.SGD(grown.parameters()), horizon=9)
    with pytest.raises(ValueError, match="slot 'stack2': its list grows by 'stack1' before"):
        growing.germinate("stack2", "stack")
    with pytest.raises(ValueError, match="slot 'stack1' is one of depth, where 'stack' grows, and no 'norm'"):
        growing.germinate("stack1", "norm")
    growing.germinate("stack1", "stack")
    save(grown, tmp_path / "grown.safetensors")
    load(fresh, tmp_path / "grown.safetensors")
    assert torch.equal(fresh(tokens), grown(tokens)) and len(fresh.blocks) == 4

    mixed = {**host().state_dict(), "stacks.0._extra_state": grown.state_dict()["stacks.0._extra_state"]}
    with pytest.raises(ValueError, match=r"and 4 by its records; load a state that was saved as a whole"):
        host().load_state_dict(mixed)
    for decider in ("scaling", "tamiyo_depth"):
        with pytest.raises(ValueError, match=f"{decider} decides about depth; use the callback Stack with plan="):
            Grow(decider=decider)


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "fused"], {"loop"}))
def test_an_episode_goes_on_bit_for_bit_at_its_depth(executor: str) -> None:
    whole = Episode(make_deep(executor, batches=4.0), 7).play(5)
    assert any(slot.occupied for env in whole.pool.envs for slot in env.slots[1:]), "some host has become deeper"
    file = io.BytesIO()
    torch.save(whole.pool.state_dict(), file)
    file.seek(0)

    other = make_deep(executor, batches=4.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    continued = whole.continue_in(other).play(4)
    whole.play(4)

    for ours, theirs in zip(whole.rows[5:], continued.rows, strict=True):
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_blocks_that_are_built_in_have_weights_of_their_own_and_the_scale_of_the_final_depth() -> None:
    pool = make_deep()
    deep = (FossilizedSeed("stack1", "stack"),)
    StaticController([deep, ()]).reset(pool)
    built, plain = (env.network for env in pool.envs)

    assert pool.envs[0].slots[1].stage is Stage.FOSSILIZED and len(built.blocks) == 4
    for block, source in zip(built.blocks[2:], built.blocks[:2], strict=True):
        assert not torch.equal(block.mlp[0].weight, source.mlp[0].weight)
    spread = [network.blocks[0].mlp[-1].weight.std().item() for network in (built, plain)]
    assert spread[0] == pytest.approx(spread[1] / 2**0.5, rel=0.1)
    assert pool.step(act(WAIT, WAIT)).metrics.loss.isfinite().all()


@pytest.mark.slow
def test_with_a_budget_the_network_built_in_has_the_flops_of_the_grown_one() -> None:
    pool = make_deep(batches=6.0)
    grown = play_episode(pool, "random", RandomValid(5), rng_seeds=[1, 3])
    (static,) = play_static(pool, "static", grown, rng_seeds=[1, 3])

    assert grown.fossils.sum() > 0 and static.parameters.tolist() == grown.parameters.tolist()
    for spent, other, env in zip(static.flops, grown.flops, pool.envs, strict=True):
        assert abs(spent - other) < 16 * env.flops.of_step(env.slots)


def test_the_policy_sees_the_size_of_copies_and_the_budget() -> None:
    limited, free = make_deep(batches=10.0), make_deep()
    place = limited.feature_names.index("budget")
    before = limited.step(act(WAIT, WAIT)).observation[0][:, 0, place].clone()
    after = limited.step(act(stacked(limited, 1), WAIT)).observation[0][:, 0, place]

    assert "budget" not in free.feature_names
    assert after[0] < after[1] < before[1], "a deeper host has fewer tokens for each parameter"


def test_a_policy_that_was_trained_with_a_budget_is_refused_without_one_and_the_other_way_round() -> None:
    limited, free = make_deep(batches=10.0), make_deep()
    cases = [(limited, free, "trained with a budget .*, and these hosts have none; let the rule scaling")]
    cases += [(free, limited, "trained without a budget .*, and these hosts have one")]
    for trained, offered, message in cases:
        config = trained.config
        rules = TrainingRules(config.lifecycle, config.actions)
        with pytest.raises(ValueError, match=message):
            TrainingHosts(trained.space, trained.feature_names, config.observation, rules).check(offered)


@pytest.mark.slow
def test_the_depth_policy_of_the_package_grows_where_the_budget_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    # One minibatch in each tick, and the budget as if it were spent.
    monkeypatch.setattr(HostEnv, "num_batches", lambda self, samples: 1)
    monkeypatch.setattr(HostEnv, "flops_left", property(lambda env: env.training.flops * (env.horizon - env.tick)))
    _, data = from_config("depth", "--data.n_envs=9")
    data.build(torch.device("cpu"))
    play_episode(data.pool, "tamiyo_depth", load_controller("tamiyo_depth"), rng_seeds=list(range(9)))

    copies = {(env.training.flops, sum(slot.occupied for slot in env.slots)) for env in data.pool.envs}
    assert copies == {(1.5e9, 0), (4e9, 1), (11e9, 1)}


class Alternating(nn.Module):
    """Every second block shifts its input by a number that no state dict holds; all may share a layer."""

    def __init__(self, outputs: int, *, shared: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(192, 8), nn.Linear(8, outputs)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for i, block in enumerate(self.blocks):
            block.shift = i
        if shared:
            self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x).roll(block.shift, 1)
        return self.head(x)


def test_a_deeper_host_is_loaded_with_the_settings_of_its_blocks_and_shared_blocks_are_refused() -> None:
    task, network = Synthetic([3, 8, 8], 4, train=64, validation=16, test=16), f"{__name__}.Alternating"
    host = partial(Attached, network=network, depth={"blocks": 5}, classes_as="outputs")
    one, other = (
        HostPool(task, task.load(), host, config=FAST_CONFIG, n_envs=1, device=torch.device("cpu")) for _ in range(2)
    )
    one.reset([1])
    for name in ("blocks.stack1", "blocks.stack2"):
        one.envs[0].growing.germinate(name, "stack")
    other.reset([2])
    other.envs[0].load_state_dict(unpack(one.envs[0].packed_state()))

    ours, theirs = (pool.envs[0].network for pool in (one, other))
    assert [block.shift for block in theirs.network.blocks] == [0, 1, 0, 1, 1]
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    with pytest.raises(ValueError, match="the blocks of 'blocks' share parameters"):
        host([3, 8, 8], 4, settings={"shared": True})
