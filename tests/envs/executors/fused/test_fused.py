"""Hosts stacked into one network give the same results as separate hosts."""

from dataclasses import replace

import pytest
import torch

from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.stages import Stage
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, EpisodeRecord, distance, make, play
from tests.tiers import rest_is_slow

EXACT = 1e-9
"""Relative tolerance in float64."""

LEARNING_SEEDS = 1e-6
"""Relative tolerance in float64 where seeds learn behind GPT for several ticks, which amplifies rounding."""

FLOAT32 = 1e-2
"""Relative tolerance of losses and weights in float32 after 6 environment steps, because training amplifies rounding.

A shift of the loop's own weights by 1e-7 changes the losses of GPT by 1e-4 after 6 steps, and by 1e-1 after 15."""


def assert_same(ours: EpisodeRecord, theirs: EpisodeRecord, tolerance: float) -> None:
    for a, b in zip(ours.numbers, theirs.numbers, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("host", rest_is_slow(HOSTS, {"residual"}))
def test_twenty_ticks_of_any_life_equal_the_loop(host: str) -> None:
    fused, loop = make("fused", host), make("loop", host)
    ours, theirs = play(fused), play(loop)

    assert_same(ours, theirs, EXACT)
    assert distance(fused, loop) < EXACT
    assert ours.stages >= {Stage.GERMINATED, Stage.BLENDING, Stage.FOSSILIZED, Stage.CULLED}


@pytest.mark.parametrize(
    "changes",
    rest_is_slow(
        [
            {"optimizer": "adamw", "weight_decay": 0.1},
            {"weight_decay": 0.1, "lr_schedule": "cosine"},
            {"optimizer": "sgd", "weight_decay": 0.01},
            {"optimizer": "sgd", "momentum": 0.0},
            {"max_grad_norm": 0.05},
            {"max_grad_norm": None, "seed_lr_factor": 3.0, "lr_schedule": "cosine"},
            {"micro_batches": 4},
            {"carry_over": False},
        ],
        lambda changes: (
            "seed_lr_factor" in changes or "micro_batches" in changes or changes.get("optimizer") == "adamw"
        ),
    ),
    ids=str,
)
def test_however_hosts_learn_it_equals_the_loop(changes: dict[str, object]) -> None:
    training = replace(FAST_CONFIG.training, **changes)
    fused, loop = (make(name, "cnn", 3, training=training) for name in ("fused", "loop"))

    assert_same(play(fused, 6), play(loop, 6), EXACT)
    assert distance(fused, loop) < EXACT


@pytest.mark.parametrize("host", rest_is_slow(HOSTS, {"cnn, recomputed"}))
@pytest.mark.parametrize("isolation", ["proximal", "straight_through"])
def test_seeds_learn_behind_their_hosts_as_in_the_loop(host: str, isolation: Isolation) -> None:
    lifecycle = replace(FAST_CONFIG.lifecycle, isolation=isolation, training_ticks=2, min_potential=-5.0)
    fused, loop = (make(name, host, 3, lifecycle=lifecycle) for name in ("fused", "loop"))

    assert_same(play(fused, 6), play(loop, 6), LEARNING_SEEDS)
    assert distance(fused, loop) < LEARNING_SEEDS


@pytest.mark.parametrize("host", rest_is_slow(["cnn", "gpt", "mlp"], {"cnn", "gpt"}))
def test_in_float32_it_equals_the_loop_to_a_tolerance(host: str) -> None:
    fused, loop = (make(name, host, dtype=torch.float32) for name in ("fused", "loop"))

    ours, theirs = play(fused, 6), play(loop, 6)

    torch.testing.assert_close(ours.losses, theirs.losses, rtol=FLOAT32, atol=0.0)
    assert distance(fused, loop) < FLOAT32


@pytest.mark.parametrize("host", ["cnn", "gpt"])
def test_a_trajectory_depends_neither_on_neighbours_nor_on_their_number(host: str) -> None:
    alone, among = make("fused", host, 1), make("fused", host, 5)
    for pool, seeds in ((alone, [2]), (among, range(5))):
        pool.reset(list(seeds))
    grown = ((among.envs[2], 0), (alone.envs[0], 0), (among.envs[0], 1), (among.envs[4], 0))
    for env, slot in grown:
        env.growing.germinate(env.slots[slot].name, env.space.blueprint[slot + 1])
    among.envs[3].optimizer.param_groups[0]["lr"] = 1e3  # a host that diverges
    for pool in (alone, among):
        pool.train_without_actions(4)

    own, shared = (env.network.state_dict() for env in (alone.envs[0], among.envs[2]))
    assert own.keys() == shared.keys()
    for name, value in own.items():
        torch.testing.assert_close(shared[name], value, rtol=EXACT, atol=EXACT)
    assert alone.envs[0].history.loss == pytest.approx(among.envs[2].history.loss, rel=EXACT)


def test_a_host_that_is_not_a_number_leaves_the_others_alone() -> None:
    fused, loop = make("fused", "cnn", 3), make("loop", "cnn", 3)
    for pool in (fused, loop):
        pool.reset([0, 1, 2])
        with torch.no_grad():
            pool.envs[1].network.head.weight.fill_(float("nan"))
        pool.train_without_actions(2)

    for mine, its in zip(fused.envs, loop.envs, strict=True):
        assert mine.history.loss == pytest.approx(its.history.loss, rel=EXACT, nan_ok=True)
    assert fused.envs[1].history.loss[-1] != fused.envs[1].history.loss[-1]


def test_between_ticks_everything_lives_in_the_environments_so_executors_may_take_turns() -> None:
    turns, loop = make("fused", "cnn"), make("loop", "cnn")
    other = loop.executor
    for pool in (turns, loop):
        pool.reset(range(4))
    for tick in range(6):
        if tick == 3:
            turns.executor = other
        for pool in (turns, loop):
            if tick == 1:
                for i, env in enumerate(pool.envs[:3]):
                    env.growing.germinate(env.slots[i].name, "conv_light")
            pool.train_without_actions(1)

    assert distance(turns, loop) < EXACT
    for one, two in zip(turns.envs, loop.envs, strict=True):
        ours, theirs = one.optimizer.state_dict()["state"], two.optimizer.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for key, state in theirs.items():
            assert ours[key]["step"] == state["step"]
            torch.testing.assert_close(ours[key]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=EXACT)


def test_each_group_has_its_own_learning_rate() -> None:
    fused, loop = make("fused", "mlp"), make("loop", "mlp")
    for pool in (fused, loop):
        pool.reset(range(4))
        for i, env in enumerate(pool.envs):
            env.growing.germinate("layer1", "lora")
            env.optimizer.param_groups[0]["lr"] *= 0.5**i
            env.optimizer.param_groups[1]["lr"] *= 0.1 * i
        pool.train_without_actions(2)

    assert distance(fused, loop) < EXACT


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    whole, resumed = make("fused", "cnn"), make("fused", "cnn")
    play(whole, 6)
    state = whole.state_dict()
    play(resumed, 2, seeds=[9, 8, 7, 6])
    resumed.load_state_dict(state)

    ours, theirs = play(resumed, 5, reset=False), play(whole, 5, reset=False)

    assert all(torch.equal(a, b) for a, b in zip(ours.numbers, theirs.numbers, strict=True))
    assert distance(resumed, whole) == 0.0


def test_one_host_of_the_stack_can_be_taken_back_without_the_others() -> None:
    back, straight = make("fused", "cnn", 3), make("fused", "cnn", 3)
    for pool in (back, straight):
        pool.reset(range(3))
        pool.envs[1].growing.germinate("block1", "norm")
        pool.train_without_actions(2)
    kept = back.envs[1].state_dict()
    for pool in (back, straight):
        pool.train_without_actions(2)
    back.envs[1].load_state_dict(kept)
    before = [back.envs[i].network.state_dict()["head.weight"].clone() for i in range(3)]
    for i in (0, 2):
        assert torch.equal(before[i], straight.envs[i].network.state_dict()["head.weight"])
    back.train_without_actions(2)
    straight.train_without_actions(2)

    # The step count differs, and so do the stages of the seeds; the other hosts are unchanged.
    for i in (0, 2):
        for a, b in zip(back.envs[i].network.parameters(), straight.envs[i].network.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_what_has_been_grown_before_is_grown_by_the_same_program() -> None:
    pool = make("fused", "cnn", 2)
    pool.reset([0, 1])
    pool.envs[0].growing.germinate("block1", "norm")
    pool.train_without_actions(1)
    (stack,) = pool.executor.stacks.values()
    banks = dict(stack.slots["block1"].seeds_by_kind)
    pool.envs[1].growing.germinate("block1", "norm")
    pool.train_without_actions(1)
    pool.envs[0].growing.remove_seed("block1")
    pool.train_without_actions(1)

    assert list(pool.executor.stacks.values()) == [stack]
    assert stack.slots["block1"].seeds_by_kind == banks


def test_gradient_statistics_are_those_of_the_loop() -> None:
    rows = []
    for name in ("fused", "loop"):
        pool = make(name, "gpt", 3, training=HostTraining(batches=2, batch_size=16, max_grad_norm=0.01))
        pool.reset(range(3))
        pool.envs[0].growing.germinate("layer1", "mlp_small")
        pool.envs[2].growing.germinate("layer2", "norm", style="gate")
        rows.append(pool.executor.train_epoch(pool.envs, pool.data.train))

    torch.testing.assert_close(*rows, rtol=EXACT, atol=EXACT)
    assert rows[0].shape == (3, 3 + 4 * 3)
    assert [bool(row.any()) for row in rows[0][:, 7:11]] == [True, False, False], "seeds in the first slot"


def test_test_accuracy_and_single_hosts_are_measured_as_by_the_loop() -> None:
    fused, loop = make("fused", "residual"), make("loop", "residual")
    for pool in (fused, loop):
        play(pool, 9)
    name = fused.envs[0].slots[0].name

    torch.testing.assert_close(fused.test_accuracy(), loop.test_accuracy())
    torch.testing.assert_close(fused.test_accuracy(fossilized_only=False), loop.test_accuracy(fossilized_only=False))
    family = [frozenset(), frozenset({name}), frozenset({"last", "tail"})]
    torch.testing.assert_close(*(pool.variant_accuracies(1, family, pool.data.test) for pool in (fused, loop)))


def test_validation_takes_large_data_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make("fused", "cnn", 3)
    play(pool, 5)
    whole = pool.executor.validate(pool.envs, pool.data.validation)
    # Passes of 16 samples, 50 in all.
    monkeypatch.setattr("esper_lightning.envs.executors.fused.executor.MAX_INPUT_ELEMENTS", {"cpu": 1})

    torch.testing.assert_close(pool.executor.validate(pool.envs, pool.data.validation), whole, rtol=EXACT, atol=0.0)
