"""Hosts batched into one network give the same results as separate hosts, whatever happens to them."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.executors import FusedExecutor
from esper_lightning.envs.executors.fused.layers import BatchedConv2d, BatchedLinear
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.blueprints import registry
from esper_lightning.growth.blueprints.registry import Blueprint
from esper_lightning.growth.blueprints.seeds import Residual
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import AugmentConfig
from esper_lightning.tasks.task import TOKEN_ELEMENTS
from tests.conftest import FREE
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, EpisodeRecord, distance, make, play, precision
from tests.imitated_gpu import GPU, ImitatedGpu
from tests.tiers import rest_is_slow

EXACT = 1e-9
"""Relative tolerance in float64."""

LEARNING_SEEDS = 1e-6
"""Relative tolerance in float64 of GPT over many ticks, and where seeds learn behind it: both amplify rounding."""


HALVES = {"bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 5e-3)}
"""Data type, and relative tolerance of losses after 3 environment steps: about the difference of the loop from fp32."""

TRAINING = FAST_CONFIG.training


def both(host: str = "cnn", n_envs: int = 3, **changes: Any) -> tuple[HostPool, HostPool]:
    """Return the same pool with executor fused and with executor loop."""
    return make("fused", host, n_envs, **changes), make("loop", host, n_envs, **changes)


def assert_same(ours: EpisodeRecord, theirs: EpisodeRecord, tolerance: float) -> None:
    for a, b in zip(ours.numbers, theirs.numbers, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_equal(fused: HostPool, loop: HostPool) -> None:
    assert distance(fused, loop) < EXACT
    for ours, theirs in zip(fused.envs, loop.envs, strict=True):
        assert ours.history.loss == pytest.approx(theirs.history.loss, rel=EXACT, nan_ok=True)


@pytest.mark.parametrize("host", rest_is_slow(HOSTS, {"residual"}))
def test_twenty_ticks_of_any_life_equal_the_loop(host: str) -> None:
    # At the full learning rate hosts that become deeper amplify rounding tenfold in a tick.
    training = replace(TRAINING, lr=TRAINING.lr / 2) if host == "gpt, depth" else TRAINING
    n_envs = 8 if host == "gpt, rotary" else 4  # with one slot, few hosts fossilize anything
    fused, loop = both(host, n_envs, training=training)
    ours, theirs = play(fused), play(loop)

    tolerance = LEARNING_SEEDS if host.startswith("gpt") else EXACT
    assert_same(ours, theirs, tolerance)
    assert distance(fused, loop) < tolerance
    assert ours.stages >= {Stage.GERMINATED, Stage.BLENDING, Stage.FOSSILIZED, Stage.CULLED}


@pytest.mark.parametrize(
    "changes",
    rest_is_slow(
        [
            {"optimizer": "adamw", "weight_decay": 0.1},
            {"weight_decay": 0.1, "lr_schedule": "cosine"},
            {"optimizer": "sgd", "weight_decay": 0.01, "max_grad_norm": 0.05},
            {"max_grad_norm": None, "lr_schedule": "cosine"},
            {"batches": None, "flops": 4e6},
            {"micro_batches": 4, "augment": AugmentConfig(pad=1, flip=True)},
        ],
        lambda changes: bool({"micro_batches", "flops"} & {*changes}) or changes.get("optimizer") == "adamw",
    ),
    ids=str,
)
def test_however_hosts_learn_it_equals_the_loop(changes: dict[str, Any]) -> None:
    fused, loop = both(training=replace(TRAINING, **changes))

    assert_same(play(fused, 6), play(loop, 6), EXACT)
    assert distance(fused, loop) < EXACT


@pytest.mark.parametrize("host", rest_is_slow(HOSTS, {"cnn, recomputed"}))
@pytest.mark.parametrize("isolation", ["proximal", "straight_through"])
def test_seeds_learn_behind_their_hosts_as_in_the_loop(host: str, isolation: Isolation) -> None:
    lifecycle = replace(FAST_CONFIG.lifecycle, isolation=isolation, training_ticks=2)
    fused, loop = both(host, lifecycle=lifecycle)

    assert_same(play(fused, 6), play(loop, 6), LEARNING_SEEDS)
    assert distance(fused, loop) < LEARNING_SEEDS


@pytest.mark.parametrize(
    ("host", "half"), rest_is_slow(product(["cnn", "gpt"], HALVES), {("cnn", "fp16"), ("cnn", "bf16")})
)
def test_in_half_precision_all_layers_compute_in_it_and_what_is_measured_is_not_rounded(host: str, half: str) -> None:
    pools = both(host, dtype=torch.float32, training=replace(TRAINING, precision=half))
    ours, theirs = (play(pool, 3).losses for pool in pools)
    dtype, tolerance = HALVES[half]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)

    pool = make("fused", host, 3, torch.float32, training=replace(TRAINING, precision=half))
    pool.reset(range(3))
    for env in pool.envs:
        env.growing.germinate(env.slots[0].name, "attention")
    pool.train_without_actions(1)
    seen = set()

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str) -> None:
        seen.add((name, module.training, output.dtype))

    (batched,) = pool.executor.batched.values()  # type: ignore[attr-defined]
    modules = batched.network.named_modules()
    layers = {name: one for name, one in modules if isinstance(one, BatchedConv2d | BatchedLinear)}
    for name, layer in layers.items():
        layer.register_forward_hook(partial(watch, name=name))
    pool.train_without_actions(2)
    measured = pool.executor.validate(pool.envs, pool.data.validation)

    assert sum(".seed." in name for name in layers) >= 2
    assert seen == {(name, mode, dtype) for name in layers for mode in (True, False)}
    assert {p.dtype for env in pool.envs for p in env.network.parameters()} == {measured.dtype} == {torch.float32}
    assert not torch.equal(measured[:, 0], measured[:, 0].to(dtype).float())


@pytest.mark.parametrize("host", rest_is_slow(["cnn", "residual"], {"cnn"}))
def test_all_that_a_controller_may_choose(host: str) -> None:
    pools = both(host, 4, **FREE | {"horizon": 20})
    for pool in pools:
        wanderer = RandomValid(3)
        with precision(torch.float64):
            pool.reset(range(4))
            for _ in range(20):
                pool.step(wanderer.act(pool))

    assert_equal(*pools)


@pytest.mark.parametrize("host", rest_is_slow(["cnn", "gpt"], {"cnn"}))
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


def test_seeds_with_running_statistics_in_hosts_that_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation of activations must not update running statistics."""

    def normed(channels: int) -> nn.Module:
        return Residual(nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1))

    blueprint = Blueprint("normed", frozenset({"image"}), normed, lambda c: c * c + 3 * c, lambda c, n: 0)
    monkeypatch.setitem(registry._BLUEPRINTS, ("image", "normed"), blueprint)
    monkeypatch.setitem(HOSTS, "twice", partial(CNN, base=4, pools=1, blocks=2, checkpoint_activations=True))
    pools = both("twice", actions=ActionConfig(blueprints=["normed", "norm"], tempos={"FAST": 1}))
    for pool in pools:
        play(pool, 8)

    assert_equal(*pools)
    grown = [name for env in pools[0].envs for name in env.network.state_dict() if "seed" in name]
    assert any("running_mean" in name for name in grown)


def test_executors_may_take_turns_because_everything_lives_in_the_environments() -> None:
    """Batched hosts first meet seeds that have grown in a validation pass; later the loop takes over."""
    turns, loop = make("loop", "cnn", 3), make("loop", "cnn", 3)
    for pool in (turns, loop):
        play(pool, 8)
    by_loop, turns.executor = turns.executor, FusedExecutor(turns.task, turns.config.training)
    turns.test_scores()[1]
    for ticks in (2, 2):
        for pool in (turns, loop):
            pool.train_without_actions(ticks)
        assert_equal(turns, loop)
        turns.executor = by_loop
    for one, two in zip(turns.envs, loop.envs, strict=True):
        ours, theirs = one.optimizer.state_dict()["state"], two.optimizer.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for key, state in theirs.items():
            assert ours[key]["step"] == state["step"]
            torch.testing.assert_close(ours[key]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=EXACT)


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    whole, resumed = make("fused", "cnn"), make("fused", "cnn")
    play(whole, 6)
    state = whole.state_dict()
    play(resumed, 2, seeds=[9, 8, 7, 6])
    resumed.load_state_dict(state)
    ours, theirs = play(resumed, 5, reset=False), play(whole, 5, reset=False)

    assert all(torch.equal(a, b) for a, b in zip(ours.numbers, theirs.numbers, strict=True))
    assert distance(resumed, whole) == 0.0


def test_gradient_statistics_are_those_of_the_loop() -> None:
    rows = []
    for pool in both("gpt", training=HostTraining(batches=2, batch_size=16, max_grad_norm=0.01)):
        pool.reset(range(3))
        pool.envs[0].growing.germinate("layer1", "mlp_small")
        pool.envs[2].growing.germinate("layer2", "norm")
        rows.append(pool.executor.train_epoch(pool.envs, pool.data.train))

    torch.testing.assert_close(*rows, rtol=EXACT, atol=EXACT)
    assert rows[0].shape == (3, 3 + 4 * 3)
    assert [bool(row.any()) for row in rows[0][:, 7:11]] == [True, False, False], "seeds in the first slot"


@pytest.mark.parametrize(("host", "passes"), [("cnn", 4), ("gpt", 2)])
def test_validation_takes_large_data_in_pieces(monkeypatch: pytest.MonkeyPatch, host: str, passes: int) -> None:
    """A piece of text has fewer samples, as a token becomes many numbers."""
    pool = make("fused", host, 3)
    play(pool, 5)
    data, lengths = pool.data.validation, []
    whole = pool.executor.validate(pool.envs, data)
    measure = pool.task.measure
    elements = 3 * 16 * data.inputs[0].numel() * (TOKEN_ELEMENTS if host == "gpt" else 1)  # of 3 hosts and 16 samples
    monkeypatch.setattr("esper_lightning.envs.executors.fused.executor.MAX_INPUT_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(pool.task, "measure", lambda *batch: lengths.append(len(batch[1])) or measure(*batch))

    torch.testing.assert_close(pool.executor.validate(pool.envs, data), whole, rtol=EXACT, atol=0.0)
    assert len(lengths) == passes  # of 50 images or 24 texts


@pytest.mark.parametrize(
    ("host", "rule"),
    rest_is_slow([("cnn", "adamw"), ("gpt", "adam"), ("residual", "sgd")], lambda case: case[0] != "residual"),
)
def test_training_and_validation_wait_for_nothing(host: str, rule: str) -> None:
    training = replace(TRAINING, optimizer=rule, weight_decay=0.01)
    with ImitatedGpu() as gpu:
        pool = make("fused", host, 4, device=GPU, training=training)
        play(pool, 6)
        gpu.waits.clear()
        pool.executor.train_epoch(pool.envs, pool.data.train)
        pool.executor.validate(pool.envs, pool.data.validation)
        assert gpu.waits == {}
