"""Hosts that grow in depth within a pool: budgets, resuming, rollbacks, and what the policy sees."""

import io
from functools import partial

import pytest
import torch

from esper_lightning import from_config
from esper_lightning.controllers.learned import TrainingHosts, TrainingRules
from esper_lightning.controllers.rules import RandomValid, Scaling
from esper_lightning.controllers.static import FossilizedSeed, StaticController
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.checkpoints import load_controller
from esper_lightning.evaluation.play import play_episode, play_static
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import Attached
from esper_lightning.tasks import Synthetic
from tests.decisions import WAIT, act, germinate
from tests.envs.episodes import Episode, breaking_epoch
from tests.envs.executors.fused.hosts import FAST_CONFIG, make

STACK, LAST = 0, 1


def make_deep(executor: str = "loop", batches: float | None = None, **settings: object) -> HostPool:
    """Return two GPTs of two blocks that grow to six; `batches`: host epochs of so many minibatches' FLOPs."""
    pool = make("loop", "gpt, depth", 2, actions=FAST_CONFIG.actions)
    training = HostTraining(batches=2, batch_size=16, lr=0.02)
    if batches is not None:
        training = HostTraining(flops=batches * 16 * pool.envs[0].flops.of_step([]), batch_size=16, lr=0.02)
    pool = make(executor, "gpt, depth", 2, training=training, **settings)
    assert pool.space.slot == ["layer2", "stack1", "stack2"] and {"stack", "last"} <= set(pool.space.blueprint)
    return pool


def stacked(pool: HostPool, slot: int, blueprint: str) -> tuple[int, ...]:
    return germinate(slot, pool.space.blueprint.index(blueprint))


def test_a_deeper_host_trains_on_fewer_minibatches_of_the_same_flops() -> None:
    pool = make_deep(batches=10.0)
    pool.reset([1, 3])
    counts: list[list[int]] = [[], []]
    for host, env in enumerate(pool.envs):
        env.on_batches = partial(lambda counts, batches: counts.append(len(batches.indices)), counts[host])
    budgets = []
    for rows in (
        [WAIT, WAIT],
        [stacked(pool, 1, "stack"), stacked(pool, 1, "last")],
        [WAIT, stacked(pool, 2, "stack")],
    ):
        pool.step(act(*rows))
        budgets.append(pool.envs[1].flops_left)

    flops = pool.envs[0].flops
    share = flops.host / (flops.host + 2 * flops.blocks["stack1"])
    assert counts[0][:2] == [10, int(10 * share)] and counts[1][0] == 10 > counts[1][1] > counts[1][2]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] is not None
    assert [slot.stage for slot in pool.envs[0].slots] == [Stage.DORMANT, Stage.FOSSILIZED, Stage.DORMANT]
    assert [len(env.network.blocks) for env in pool.envs] == [4, 5]
    assert [record.contribution for record in pool.envs[1].records] == [None] * 3, "no copy is judged by its absence"


def test_depth_slots_of_one_list_are_offered_in_turn() -> None:
    pool = make_deep()
    pool.reset([1, 3])
    for row, offered in (WAIT, ["stack1"]), (stacked(pool, 1, "stack"), ["stack2"]), (stacked(pool, 2, "last"), []):
        pool.step(act(row, WAIT))
        possible = pool.masks_on_cpu.slot[:, Op.GERMINATE, 1:].tolist()
        assert [name for name, may in zip(pool.space.slot[1:], possible[0], strict=True) if may] == offered
        assert possible[1] == [True, False]


def test_hosts_of_the_depth_config_spend_their_budgets_up_to_one_minibatch() -> None:
    budgets = "--data.env.family.train=[{training.flops: [2.0e+8, 5.0e+8]}]"
    _, data = from_config("depth", "--data.n_envs=3", budgets, "--data.host.init_args.width=8")
    data.build(torch.device("cpu"))
    outcome = play_episode(data.pool, "scaling", Scaling(), rng_seeds=[2, 4, 6])

    assert len({env.training.flops for env in data.pool.envs}) == 2
    assert set(outcome.parameters) > {env.host_parameters for env in data.pool.envs}, "some hosts are deeper, not all"
    for env in data.pool.envs:
        left = env.flops_left
        assert left is not None and 0 <= left < 4 * env.flops.of_step(env.slots)


@pytest.mark.parametrize("doublings", [0, 1, 2])
def test_the_scaling_rule_adds_stacks_as_long_as_the_flops_left_suffice(doublings: int) -> None:
    rule, pool = Scaling(), make_deep(batches=10.0)
    pool.reset([1, 3])
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
    stack = next(slot for slot in env.slots if isinstance(slot, DepthSlot))
    [positions] = env.flops.positions[stack.name]

    assert env.flops.targets == targets and env.flops_left is not None
    assert env.targets_per_parameter(100) == pytest.approx(env.flops_left / 6e4 * targets / positions)


@pytest.mark.parametrize("executor", ["loop", "fused"])
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
        for a, b in zip(ours, theirs, strict=True):
            assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_rollback_keeps_copies_as_it_keeps_what_is_fossilized() -> None:
    pool = make_deep(governor=GovernorConfig())
    pool.reset([1, 3])
    with breaking_epoch(pool, [0]):
        step = pool.step(act(stacked(pool, 1, "stack"), stacked(pool, 1, "stack")))

    assert [verdict.host for verdict in step.verdicts] == [0]
    assert [env.slots[1].stage for env in pool.envs] == [Stage.FOSSILIZED] * 2
    copied, learned = (
        [
            torch.equal(a, b)
            for a, b in zip(env.network.blocks[3].parameters(), env.network.blocks[1].parameters(), strict=True)
        ]
        for env in pool.envs
    )
    assert all(copied) and not any(learned)


def test_blocks_that_are_built_in_have_weights_of_their_own_and_the_scale_of_the_final_depth() -> None:
    pool = make_deep()
    pool.reset([1, 3])
    deep = (FossilizedSeed("stack1", "stack", "add"),)
    StaticController([deep, ()]).reset(pool)
    built, plain = (env.network for env in pool.envs)

    assert pool.envs[0].slots[1].stage is Stage.FOSSILIZED and len(built.blocks) == 4
    for block, source in zip(built.blocks[2:], built.blocks[:2], strict=True):
        assert not torch.equal(block.mlp[0].weight, source.mlp[0].weight)
    spread = [network.blocks[0].mlp[-1].weight.std().item() for network in (built, plain)]
    assert spread[0] == pytest.approx(spread[1] / 2**0.5, rel=0.1)
    assert pool.step(act(WAIT, WAIT)).metrics.loss.isfinite().all()


def test_with_a_budget_the_network_built_in_has_the_flops_of_the_grown_one() -> None:
    pool = make_deep(batches=6.0)
    grown = play_episode(pool, "random", RandomValid(5), rng_seeds=[1, 3])
    (static,) = play_static(pool, "static", grown, rng_seeds=[1, 3])

    assert grown.fossils.sum() > 0 and static.parameters.tolist() == grown.parameters.tolist()
    for spent, other, env in zip(static.flops, grown.flops, pool.envs, strict=True):
        assert abs(spent - other) < 16 * env.flops.of_step(env.slots)


def test_the_policy_sees_the_size_of_copies_and_the_budget() -> None:
    limited, free = make_deep(batches=10.0), make_deep()
    limited.reset([1, 3])
    place = limited.feature_names.index("budget")
    before = limited.step(act(WAIT, WAIT)).observation[0][:, 0, place].clone()
    after = limited.step(act(stacked(limited, 1, "stack"), WAIT)).observation[0][:, 0, place]

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
            TrainingHosts(trained.space, trained.feature_names, config.sight, rules).check(offered)


def test_the_depth_policy_of_the_package_grows_where_the_budget_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    # One minibatch in each tick, and the budget as if it were spent.
    monkeypatch.setattr(HostEnv, "num_batches", lambda self, samples: 1)
    monkeypatch.setattr(HostEnv, "flops_left", property(lambda env: env.training.flops * (env.horizon - env.tick)))
    _, data = from_config("depth", "--data.n_envs=9", "--data.task.init_args.train=200")
    data.build(torch.device("cpu"))
    play_episode(data.pool, "tamiyo_depth", load_controller("tamiyo_depth"), rng_seeds=list(range(9)))

    copies = {(env.training.flops, sum(slot.occupied for slot in env.slots)) for env in data.pool.envs}
    assert copies == {(1.5e9, 0), (4e9, 1), (11e9, 1)}


def test_a_network_of_others_becomes_deeper_in_a_pool() -> None:
    task = Synthetic([3, 8, 8], 4, train=64, validation=16, test=16)
    host = partial(
        Attached,
        network="torchvision.models.VisionTransformer",
        settings={"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32},
        depth={"encoder.layers": 6},
    )
    pool = HostPool(task, task.load(), host, config=FAST_CONFIG, n_envs=1, device=torch.device("cpu"))
    pool.reset([1])
    step = pool.step(act(germinate(0, LAST)))

    assert pool.space.slot == ["encoder.layers.stack1", "encoder.layers.stack2"] and pool.space.blueprint == [
        "stack",
        "last",
    ]
    assert [slot.occupied for slot in pool.envs[0].slots] == [True, False] and step.metrics.loss.isfinite().all()
