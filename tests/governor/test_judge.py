import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.envs.governor import (
    EpochStats,
    GovernorConfig,
    GovernorState,
    Judgement,
    Verdict,
    judge,
    veto_reasons,
)

HEALTHY, SUSPICIOUS, ROLL_BACK, END = Verdict

CHANCE = math.log(10.0)

# Thresholds of this file: the tests check the rules, not the default thresholds.
CONFIG = GovernorConfig(
    window=4, max_loss=12.0, max_ratio=3.0, patience=3, learned=0.6, guessing=0.065, cooldown=5, max_rollbacks=3
)

WAVES = (0.5, 1.5, 0.5, 1.5)
"""Losses with mean 1 and standard deviation 0.5."""

LEARNED = (0.2, 0.2, 0.2, 0.2)

NEW = GovernorState()


def reading(loss: float, **more: Any) -> EpochStats:
    return EpochStats(loss, **{"train_loss": 1.0, **more})


def of(loss: float, watch: GovernorState, config: GovernorConfig = CONFIG, **more: Any) -> Judgement:
    return judge(watch, reading(loss, **more), CHANCE, config=config)[0]


def through(
    losses: Iterable[float], watch: GovernorState = NEW, config: GovernorConfig = CONFIG
) -> tuple[list, GovernorState]:
    """Return the verdicts on host epochs with these losses, one after the other, and the final state."""
    decisions = []
    for loss in losses:
        verdict, watch = judge(watch, reading(loss), CHANCE, config=config)
        decisions.append(verdict.outcome)
    return decisions, watch


@pytest.mark.parametrize(
    ("settings", "normal", "bound"),
    [
        ({"max_loss": 12.0, "max_ratio": 99.0}, 4.0, 12.0),
        ({"max_ratio": 3.0}, 1.0, 3.0),
        ({"guessing": 0.25, "max_ratio": 99.0}, 1.0, 3.0),  # a quarter below the loss of guessing, 4
        ({"guessing": 0.25, "max_ratio": 99.0, "learned": 0.5}, 1.99, 3.0),  # it has learned
        ({"guessing": 0.25, "max_ratio": 99.0, "learned": 0.5}, 2.0, 12.0),  # it has not
    ],
)
def test_a_loss_is_suspicious_above_its_bound_and_not_at_it(
    settings: dict[str, float], normal: float, bound: float
) -> None:
    config, state = replace(CONFIG, **settings), GovernorState((normal,) * 4)
    for loss, outcome in ((bound, HEALTHY), (math.nextafter(bound, math.inf), SUSPICIOUS)):
        assert judge(state, reading(loss), 4.0, config=config)[0].outcome is outcome


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_leads_to_a_rollback_at_once(number: float) -> None:
    for wrong, name in (
        (EpochStats(number, 1.0), "loss is"),
        (EpochStats(1.0, number), "training loss is"),
        (EpochStats(1.0, 1.0, (0.1, number)), "a gradient's norm is"),
    ):
        for watch in (GovernorState(), GovernorState(WAVES), GovernorState(WAVES, cooldown=5, rollbacks=1)):
            verdict, after = judge(watch, wrong, CHANCE, config=CONFIG)
            assert verdict.outcome is ROLL_BACK and verdict.outcome.diverged
            assert verdict.cause == f"{name} {number}"
            assert after == GovernorState(cooldown=5, rollbacks=watch.rollbacks + 1)


def test_a_host_that_had_learned_and_guesses_again_is_suspicious() -> None:
    loose = replace(CONFIG, max_ratio=100.0)  # by this rule alone
    for loss in (0.936 * CHANCE, CHANCE, 4.0 * CHANCE):
        verdict = of(loss, GovernorState(LEARNED), loose)
        assert verdict.outcome is SUSPICIOUS and "is that of guessing" in verdict.cause
        assert through([loss] * 3, GovernorState(LEARNED), loose)[0] == [SUSPICIOUS, SUSPICIOUS, ROLL_BACK]
    assert of(0.934 * CHANCE, GovernorState(LEARNED), loose).outcome is HEALTHY


def test_a_host_that_unlearns_little_by_little_had_learned_all_the_same() -> None:
    slowly = [0.5, 0.5, 0.5, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.1, 2.2, 2.3, 2.4]

    assert through(slowly)[0] == [HEALTHY] * 10 + [SUSPICIOUS, SUSPICIOUS, ROLL_BACK]
    after = through(slowly[:10])[1]
    assert after.trained_epochs > 0
    assert judge(after, reading(2.2, seed_lost_weight=True), CHANCE, config=CONFIG)[1] == GovernorState((2.2,))


@pytest.mark.parametrize(
    ("losses", "changes", "loss", "cause"),
    [
        # A host that has not learned yet may guess.
        ((0.59 * CHANCE,) * 4, {}, CHANCE, "guessing"),
        ((0.61 * CHANCE,) * 4, {}, CHANCE, ""),
        ((), {}, CHANCE, ""),
        # A loss is out of range beyond so many times the normal mean, or above the limit, whatever is normal.
        (WAVES, {"learned": 0.1}, 2.99, ""),
        (WAVES, {"learned": 0.1}, 3.01, "loss 3.01 is out of range, normal is 1"),
        ((11.9,) * 4, {"learned": 0.1}, 12.1, "loss 12.1 is above 12"),
        # A host of which little is known is held to guessing.
        *(((1.5,) * n, {}, 2.99 * CHANCE, "") for n in (0, 3)),
        *(((1.5,) * n, {}, 3.01 * CHANCE, "out of range") for n in (0, 3)),
        (LEARNED, {}, 1.0, "out of range"),
    ],
)
def test_a_loss_is_judged_by_what_is_normal(
    losses: tuple[float, ...], changes: dict[str, float], loss: float, cause: str
) -> None:
    verdict = of(loss, GovernorState(losses), replace(CONFIG, **changes))
    assert verdict.outcome is (SUSPICIOUS if cause else HEALTHY) and cause in verdict.cause


def test_patience_is_over_after_so_many_host_epochs_running() -> None:
    decisions, after = through([9.0, 9.0, 9.0], GovernorState(WAVES))
    verdict = of(9.0, GovernorState(WAVES, consecutive_anomalies=2))

    assert decisions == [SUSPICIOUS, SUSPICIOUS, ROLL_BACK]
    assert after == GovernorState(cooldown=5, rollbacks=1)
    assert verdict.cause == "loss 9 is out of range, normal is 1, 3 host epochs running"
    assert through([9.0], GovernorState(WAVES), replace(CONFIG, patience=1))[0] == [ROLL_BACK]
    decisions, after = through([9.0, 9.0, 1.0] * 2, GovernorState(WAVES))
    assert decisions == [SUSPICIOUS, SUSPICIOUS, HEALTHY] * 2, "a spike that mends itself is forgotten"
    assert after == GovernorState((*WAVES[2:], 1.0, 1.0), trained_epochs=6)


def test_a_rollback_is_not_repeated_while_it_cools_down_except_for_what_is_no_number() -> None:
    decisions, cooled = through([20.0] * 5, GovernorState(cooldown=5, rollbacks=1))

    assert decisions == [SUSPICIOUS] * 5
    assert cooled == GovernorState(consecutive_anomalies=5, cooldown=0, rollbacks=1)
    assert of(20.0, cooled).outcome is ROLL_BACK  # at once: the patience has been exceeded long ago
    assert of(CHANCE, GovernorState(LEARNED, consecutive_anomalies=9, cooldown=1)).outcome is SUSPICIOUS
    assert of(CHANCE, GovernorState(LEARNED, consecutive_anomalies=9, cooldown=0)).outcome is ROLL_BACK
    assert of(math.nan, GovernorState(cooldown=5, rollbacks=1)).outcome is ROLL_BACK


def test_after_enough_rollbacks_the_episode_ends() -> None:
    decisions, watch = through([math.nan] * 4)
    verdict = of(math.nan, watch)

    assert decisions == [ROLL_BACK, ROLL_BACK, ROLL_BACK, END]
    assert watch.rollbacks == 3 and verdict.cause == "loss is nan, after 3 rollbacks"
    assert through([math.inf], config=replace(CONFIG, max_rollbacks=0))[0] == [END]


def test_after_a_seed_lost_weight_the_past_says_nothing() -> None:
    verdict, after = judge(GovernorState(LEARNED), reading(5.0, seed_lost_weight=True), CHANCE, config=CONFIG)

    assert of(5.0, GovernorState(LEARNED)).outcome is SUSPICIOUS
    assert verdict.outcome is HEALTHY and after == GovernorState((5.0,))
    assert of(CHANCE, GovernorState(LEARNED), seed_lost_weight=True).outcome is HEALTHY
    # Absolute limits hold whatever was normal.
    assert of(12.1, GovernorState(LEARNED), seed_lost_weight=True).outcome is SUSPICIOUS
    assert of(math.nan, GovernorState(LEARNED), seed_lost_weight=True).outcome is ROLL_BACK


NUMBERS = st.one_of(
    st.floats(0.0, 3.0), st.floats(0.0, 30.0), st.sampled_from([CHANCE, math.nan, math.inf, 0.1, 0.1, 0.1, 0.1])
)

READINGS = st.lists(
    st.builds(
        EpochStats,
        NUMBERS,
        st.just(1.0) | NUMBERS,
        st.just((0.5,)) | st.tuples(NUMBERS),
        st.booleans(),
        st.integers(0, 9).map(lambda n: n == 0),
    ),
    max_size=60,
)

CONFIGS = st.builds(
    GovernorConfig,
    window=st.integers(1, 5),
    patience=st.integers(1, 4),
    cooldown=st.integers(0, 4),
    max_rollbacks=st.integers(0, 3),
    max_ratio=st.floats(1.0, 4.0),
)


@given(READINGS, CONFIGS)
def test_whatever_comes_only_healthy_losses_become_normal(readings: list[EpochStats], config: GovernorConfig) -> None:
    watch, normal, calm = GovernorState(), [], 0
    for one in readings:
        before = watch
        verdict, watch = judge(before, one, CHANCE, config=config)

        assert judge(before, one, CHANCE, config=config) == (verdict, watch), "pure"
        if verdict.outcome.diverged or one.seed_lost_weight:
            normal.clear()
        if verdict.outcome is HEALTHY:
            normal.append(one.loss)
        assert watch.losses == tuple(normal[-config.window :])
        assert all(math.isfinite(loss) for loss in watch.losses)
        assert (verdict.outcome is HEALTHY) == (verdict.cause == "")
        numbers = (one.loss, one.train_loss, *one.gradient_norms)
        assert verdict.outcome.diverged >= (not all(map(math.isfinite, numbers))), "at once, even in the cooldown"
        # During the cooldown no other rule leads to a rollback.
        assert not (verdict.outcome.diverged and calm) or not all(map(math.isfinite, numbers))
        calm = config.cooldown if verdict.outcome.diverged else max(0, calm - 1)
        if verdict.outcome.diverged:
            assert (verdict.outcome is END) == (before.rollbacks == config.max_rollbacks)
        assert watch.rollbacks == before.rollbacks + (verdict.outcome is ROLL_BACK) <= config.max_rollbacks


def test_nothing_is_built_on_a_host_whose_loss_is_out_of_range() -> None:
    for op, vetoed in {"GERMINATE": True, "FOSSILIZE": True, "WAIT": False, "CULL": False}.items():
        reasons = veto_reasons(op, GovernorState(WAVES, consecutive_anomalies=2))
        assert reasons == ["the loss has been out of range or near guessing for 2 host epochs"] * vetoed
        assert veto_reasons(op, GovernorState(WAVES)) == []
