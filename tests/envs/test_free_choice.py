"""Seeds that the controller advances, sets the alpha of and culls slowly, through `HostPool.step`."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, HostPool, StepResult
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blend import GatedSeed
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE, SMALL
from tests.decisions import WAIT, Row, act, advance, cull, fossilize, germinate, set_alpha
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

GROW = [germinate(0, 1), WAIT, advance(0), advance(0)]
"""Grow a conv_small seed in the first slot to PROBATIONARY, with alpha 1."""


@pytest.fixture
def pool(make_pool: MakePool) -> HostPool:
    made = make_pool(1, **FREE)
    made.reset([1])
    return made


def play(pool: HostPool, rows: list[Row]) -> list[StepResult]:
    return [pool.step(act(row)) for row in rows]


def events(steps: list[StepResult]) -> list[tuple[Stage, Stage, str]]:
    return [
        (event.seed_event.before, event.seed_event.after, event.seed_event.cause)
        for step in steps
        for event in step.events
    ]


def seen(pool: HostPool, slot: str = "block1.pool") -> dict[str, float]:
    """Return the features of a slot of the first environment."""
    shown = dict(zip(pool.feature_names, pool.observation.features[0].tolist(), strict=True))
    return {name.removeprefix(f"{slot}."): value for name, value in shown.items() if name.startswith(f"{slot}.")}


def test_a_seed_waits_in_every_stage_until_it_is_advanced(pool: HostPool) -> None:
    slot, stages = pool.envs[0].slots[0], []
    for row in [germinate(0, 1), WAIT, WAIT, advance(0), WAIT, WAIT, advance(0), WAIT]:
        pool.step(act(row))
        stages.append(slot.stage.name)

    assert stages == ["TRAINING"] * 3 + ["BLENDING"] * 3 + ["PROBATIONARY"] * 2


def test_an_advance_is_an_event_and_takes_effect_before_the_host_trains(pool: HostPool) -> None:
    *_, blend, probation = play(pool, GROW)

    assert events([blend]) == [(Stage.TRAINING, Stage.BLENDING, "advance")]
    assert events([probation]) == [(Stage.BLENDING, Stage.PROBATIONARY, "advance")]
    assert pool.envs[0].slots[0].age == 4


@pytest.mark.parametrize(
    ("speed", "curve", "alphas"),
    [
        (0, 0, [0.5, 0.5]),
        (1, 0, [0.75, 0.5, 0.5]),
        (2, 0, [5 / 6, 2 / 3, 0.5, 0.5]),
        (2, 1, [0.875, 0.625, 0.5, 0.5]),  # cosine: 1 - cos(60°) of the way up in halves
    ],
)
def test_alpha_goes_where_it_is_sent_as_fast_and_on_the_curve_that_was_chosen(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch, speed: int, curve: int, alphas: list[float]
) -> None:
    slot, trained = pool.envs[0].slots[0], []
    play(pool, GROW)
    pool.envs[0].network.register_forward_pre_hook(
        lambda network, _: trained.append(slot.alpha.item()) if network.training else None
    )

    steps = play(pool, [set_alpha(0, 0, speed, curve)] + [WAIT] * (len(alphas) - 1))

    assert trained[::2] == pytest.approx(alphas)  # two minibatches per epoch with the same alpha
    assert trained[1::2] == trained[::2]
    assert events(steps) == [
        (Stage.PROBATIONARY, Stage.PROBATIONARY, f"alpha to 0.5 in {pool.space.speed[speed]} ticks")
    ]
    assert slot.stage is Stage.PROBATIONARY


def test_the_host_is_validated_with_the_alpha_it_was_trained_with(pool: HostPool) -> None:
    play(pool, GROW)
    used: list[tuple[bool, float]] = []
    slot = pool.envs[0].slots[0]
    pool.envs[0].network.register_forward_pre_hook(
        lambda network, _: used.append((network.training, slot.alpha.item()))
    )

    pool.step(act(set_alpha(0, 0, speed=1)))

    assert used == [(True, 0.75), (True, 0.75), (False, 0.75)]


def test_a_seed_that_is_kept_at_half_stays_at_half(pool: HostPool) -> None:
    play(pool, [*GROW, set_alpha(0, 0), fossilize(0), WAIT])

    slot = pool.envs[0].slots[0]
    assert (slot.stage, slot.alpha.item()) == (Stage.FOSSILIZED, 0.5)
    assert (seen(pool)["alpha"], seen(pool)["alpha.target"]) == (0.5, 0.5)


def test_a_slow_cull_lets_alpha_fall_and_then_removes_the_seed(pool: HostPool) -> None:
    play(pool, GROW)
    env, shown = pool.envs[0], []
    steps = []
    for row in [cull(0, speed=2), WAIT, WAIT]:
        steps += play(pool, [row])
        shown.append((env.slots[0].stage.name, round(seen(pool)["alpha"], 3), seen(pool)["alpha.target"]))

    # The seed trains with alpha 2/3 and 1/3; at 0 the slot empties at once.
    assert shown == [("PROBATIONARY", 0.333, 0.0), ("CULLED", 0.0, 0.0), ("EMBARGOED", 0.0, 0.0)]
    assert events(steps)[:2] == [
        (Stage.PROBATIONARY, Stage.PROBATIONARY, "alpha to 0 in 3 ticks"),
        (Stage.PROBATIONARY, Stage.CULLED, "faded out"),
    ]
    assert [group["name"] for group in env.optimizer.param_groups] == ["host"]
    assert env.records[0].contribution is None


def test_a_fading_seed_can_be_called_back_or_culled_at_once(pool: HostPool) -> None:
    play(pool, [*GROW, cull(0, speed=2)])
    slot = pool.envs[0].slots[0]
    assert slot.fading

    state = pool.state_dict()
    play(pool, [set_alpha(0, target=1), WAIT])
    assert (slot.stage, slot.alpha.item(), slot.fading) == (Stage.PROBATIONARY, 1.0, False)

    pool.load_state_dict(state)
    (step,) = play(pool, [cull(0)])
    assert events([step])[0] == (Stage.PROBATIONARY, Stage.CULLED, "cull")


def test_a_fading_seed_can_neither_advance_nor_be_kept(pool: HostPool) -> None:
    play(pool, [*GROW[:3], cull(0, speed=2)])
    assert pool.envs[0].slots[0].stage is Stage.BLENDING
    with pytest.raises(ValueError, match=r"ADVANCE block1\.pool is masked"):
        pool.step(act(advance(0)))

    pool.reset([1])
    play(pool, [*GROW, cull(0, speed=2)])
    with pytest.raises(ValueError, match=r"FOSSILIZE block1\.pool is masked"):
        pool.step(act(fossilize(0)))


@pytest.mark.parametrize(("style", "curve", "blend"), [(0, "linear", "add"), (1, "sigmoid12", "multiply")])
def test_a_style_is_a_curve_and_a_way_of_blending(pool: HostPool, style: int, curve: str, blend: str) -> None:
    pool.step(act(germinate(2, 1, tempo=1, style=style)))

    slot = pool.envs[0].slots[2]
    assert (slot.ramp.curve, slot.style, slot.ramp.ticks, slot.ramp.target) == (curve, blend, 2, 1.0)


def test_a_gated_seed_learns_and_is_paid_for_with_its_gate(pool: HostPool) -> None:
    pool.step(act(germinate(0, 1, style=2)))
    env, slot = pool.envs[0], pool.envs[0].slots[0]
    gate = [p.detach().clone() for p in slot.seed.gate.parameters()] if isinstance(slot.seed, GatedSeed) else []
    play(pool, GROW[1:])

    assert (slot.style, slot.ramp.curve) == ("gate", "cosine")
    # conv_small on 4 channels has 20; the gate 4 → 8 → 1.
    assert sum(p.numel() for p in env.optimizer.param_groups[1]["params"]) == 20 + (4 * 8 + 8) + (8 + 1)
    assert not any(torch.equal(now, then) for now, then in zip(slot.seed.gate.parameters(), gate, strict=True))
    (step,) = play(pool, [fossilize(0)])
    assert step.metrics.parameters.item() == 390 + 20 + 49


@pytest.mark.parametrize("birth", ["identity", "random"])
def test_seeds_are_born_as_the_lifecycle_says(make_pool: MakePool, birth: str) -> None:
    pool = make_pool(1, lifecycle=replace(SMALL.lifecycle, birth=birth))
    env = pool.envs[0]
    env.apply(germinate(0, 1))

    feature = torch.randn(2, 4, 8, 8)
    assert torch.equal(env.slots[0].seed(feature), feature) is (birth == "identity")


def test_the_target_of_new_seeds_is_the_lifecycles(make_pool: MakePool) -> None:
    pool = make_pool(1, horizon=8, lifecycle=replace(SMALL.lifecycle, alpha_target=0.7))
    play(pool, [germinate(0, 1), WAIT, WAIT, fossilize(0)])

    slot = pool.envs[0].slots[0]
    assert (slot.stage, slot.ramp.target) == (Stage.FOSSILIZED, 0.7)
    assert slot.alpha.item() == pytest.approx(0.7)


def test_styles_are_seen_only_where_there_are_several(make_pool: MakePool, pool: HostPool) -> None:
    for few in (make_pool(1), make_pool(1, actions=ActionConfig(styles=["cosine_gate"], curves=["cosine"]))):
        assert not [name for name in few.feature_names if ".blend." in name or ".curve." in name]

    curves, blends = ("linear", "sigmoid12", "cosine"), ("add", "multiply", "gate")
    names = [*(f"curve.{curve}" for curve in curves), *(f"blend.{blend}" for blend in blends)]
    assert [seen(pool)[name] for name in names] == [0.0] * 6, "nothing grows yet"
    for style in range(3):
        pool.step(act(germinate(style, 1, style=style)))
        shown = seen(pool, pool.space.slot[style])
        assert [shown[name] for name in names] == [float(other == style) for other in range(3)] * 2


def test_a_blend_stays_and_the_curve_is_that_of_alphas_present_path(pool: HostPool) -> None:
    play(pool, [germinate(0, 1, style=1), *GROW[1:]])
    assert seen(pool)["blend.multiply"] == seen(pool)["curve.sigmoid12"] == 1.0
    play(pool, [set_alpha(0, 0, speed=1, curve=1)])

    assert seen(pool)["blend.multiply"] == seen(pool)["curve.cosine"] == 1.0
    assert seen(pool)["curve.sigmoid12"] == 0.0


def last_op(pool: HostPool) -> list[str]:
    row = pool.observation.features[0].tolist()
    prefix = "last_op."
    return [
        name.removeprefix(prefix)
        for name, value in zip(pool.feature_names, row, strict=True)
        if name.startswith(prefix) and value
    ]


def test_the_last_op_is_seen_among_those_on_offer(make_pool: MakePool, pool: HostPool) -> None:
    def shown(pool: HostPool) -> list[str]:
        return [name for name in pool.feature_names if name.startswith("last_op.")]

    four = ["last_op.WAIT", "last_op.GERMINATE", "last_op.CULL", "last_op.FOSSILIZE"]
    assert shown(make_pool(1)) == four
    assert shown(pool) == [*four, "last_op.ADVANCE", "last_op.SET_ALPHA"]

    rows = [*GROW, set_alpha(0, 0), cull(0)]
    ops = [[name for _ in play(pool, [row]) for name in last_op(pool)] for row in rows]
    assert ops == [["GERMINATE"], ["WAIT"], ["ADVANCE"], ["ADVANCE"], ["SET_ALPHA"], ["CULL"]]


SCRIPT = [  # of two environments: alpha ramps, a new target, a slow cull; a gated seed and a randomly initialised one
    [germinate(0, 1, style=2), germinate(1, 0, style=1)],
    [WAIT, germinate(0, 1, tempo=1)],
    [advance(0), advance(1)],
    [advance(0), set_alpha(1, 0, speed=2, curve=1)],
    [set_alpha(0, 0, speed=1), set_alpha(1, 1, speed=2)],
    [germinate(2, 1), advance(0)],
    [cull(0, speed=2, curve=1), cull(1, speed=2)],
    [WAIT, WAIT],
    [advance(2), cull(0, speed=1)],
    [cull(2, speed=1), WAIT],
    [WAIT, germinate(2, 0, style=2)],
    [germinate(1, 0), WAIT],
]


EVERY = range(len(SCRIPT))


def continued(pool: HostPool, tick: int) -> list[Tensor]:
    """Play the script from `tick` on and return everything observable."""
    found: list[Tensor] = []
    for rows in SCRIPT[tick:]:
        step = pool.step(act(*rows))
        found += [part.clone() for part in (*step.observation, *step.masks, step.reward, *step.metrics)]
    networks = [value.clone() for env in pool.envs for value in env.network.state_dict().values()]
    return found + networks + [env.generator.get_state() for env in pool.envs]


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state with `weights_only`, torch's strictest mode."""
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def ramp_state(slot: SeedSlot) -> str:
    """Return the state of the alpha ramp."""
    if not slot.ramping or slot.alpha_now == slot.ramp.target:
        return "at rest"
    return "fading" if slot.fading else "rising" if slot.alpha_now < slot.ramp.target else "falling"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "ticks"),
    rest_is_slow([("adam", (0, 3, 7)), ("adam", EVERY), ("sgd", EVERY)], lambda case: case[1] != EVERY),
)
def test_an_episode_continues_bit_for_bit_from_the_middle_of_any_ramp(
    make_pool: MakePool, optimizer: str, ticks: Sequence[int]
) -> None:
    training = HostTraining(optimizer=optimizer, batches=2)
    pool, other = (make_pool(2, **FREE, training=training) for _ in range(2))
    pool.reset([1, 2])
    met = set()
    for tick, rows in enumerate(SCRIPT):
        met |= {ramp_state(slot) for env in pool.envs for slot in env.slots}
        if tick not in ticks:
            pool.step(act(*rows))
            continue
        state = reloaded(pool.state_dict())
        expected = continued(pool, tick)

        other.reset([7, 8])
        wanderer = RandomValid(tick)
        for _ in range(3):
            other.step(wanderer.act(other))  # an unrelated state, which loading must replace
        other.load_state_dict(state)
        resumed = continued(other, tick)

        assert len(expected) == len(resumed)
        assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True)), f"saved at tick {tick}"
        pool.load_state_dict(state)
        pool.step(act(*rows))
    assert met == {"at rest", "rising", "falling", "fading"}


def test_an_event_of_alpha_names_its_seed(pool: HostPool) -> None:
    *_, step = play(pool, [*GROW, set_alpha(0, 0, speed=1)])

    (event,) = step.events
    assert event.seed_event == SeedEvent(
        "block1.pool",
        "conv_small",
        before=Stage.PROBATIONARY,
        after=Stage.PROBATIONARY,
        cause="alpha to 0.5 in 2 ticks",
    )
    assert (event.host, event.tick) == (0, 5)
