"""Sums of the reward's terms over an episode: complete or not shown, saved in mid-episode, joined over ranks."""

from typing import Any

import torch
from torch import Tensor

from esper_lightning.telemetry.episode_terms import EpisodeTerms, join_terms
from esper_lightning.telemetry.over_ranks import metrics_over_ranks

HORIZON = 3


def paid(tick: int, hosts: slice = slice(None)) -> dict[str, Tensor]:
    """Return the terms of four hosts in a tick."""
    return {"gain": torch.arange(4.0)[hosts] * tick, "size": torch.full((4,), -0.5)[hosts]}


def after(ticks: range, hosts: slice = slice(None), state: Any = None) -> EpisodeTerms:
    terms = EpisodeTerms(HORIZON)
    if state is not None:
        terms.load_state_dict(state)
    for tick in ticks:
        terms.update(paid(tick, hosts), tick)
    return terms


def test_sums_begin_anew_with_an_episode_and_are_shown_at_its_end() -> None:
    terms = after(range(1, 3))
    assert terms.metrics() == {}
    for tick in range(1, HORIZON + 1):  # of the next episode
        terms.update(paid(tick), tick)
    assert terms.metrics() == {"rollout/reward.gain": 1.5 * (1 + 2 + 3), "rollout/reward.size": -1.5}


def test_an_episode_that_was_not_seen_from_its_start_shows_no_sums() -> None:
    assert after(range(2, HORIZON + 1)).metrics() == {}


def test_a_state_of_mid_episode_goes_on_with_any_number_of_ranks() -> None:
    whole = after(range(1, HORIZON + 1)).metrics()
    saved = after(range(1, 3)).state_dict()
    first, second = (after(range(1, 3), hosts).state_dict() for hosts in (slice(0, 2), slice(2, 4)))

    assert join_terms([first, second]) == saved
    assert after(range(3, HORIZON + 1), state=saved).metrics() == whole
    halves = [after(range(3, HORIZON + 1), hosts, saved) for hosts in (slice(0, 2), slice(2, 4))]
    assert metrics_over_ranks([half.metrics() for half in halves]) == whole
    assert halves[0].state_dict() == EpisodeTerms(HORIZON).state_dict(), "a complete episode is written already"
