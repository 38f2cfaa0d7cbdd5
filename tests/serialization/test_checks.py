"""Strict checks of loaded state, each with one line that names the part."""

import re
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.serialization.checks import (
    check_finite,
    check_generator_state,
    check_keys,
    check_matching_tensor,
    excerpt,
    load_settings,
)

CPU = torch.Generator()


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: check_matching_tensor("the mean", 3.0, torch.ones(4)), "the mean is a float, not a tensor"),
        (
            lambda: check_matching_tensor("the mean", torch.ones(1), torch.ones(4)),  # it would be broadcast
            "the mean is torch.float32 [1], not torch.float32 [4] as in this run",
        ),
        (
            lambda: check_generator_state("its state", torch.zeros(16, dtype=torch.uint8), CPU),
            "its state is of a generator on cuda, not on cpu",
        ),
        (
            lambda: check_finite("the mean", torch.tensor([1.0, torch.nan])),
            "the mean holds numbers that are not finite",
        ),
        (lambda: check_keys("the state", [], ["a"]), "the state is a list, not a dict"),
        (lambda: check_keys("the state", {"a": 1}, ["a", "b"]), "the state lacks b"),
        (lambda: load_settings(PPOConfig, {"epoch": 3}), "the settings PPOConfig do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(check: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        check()


def test_what_fits_is_returned() -> None:
    state = CPU.get_state()
    checked = check_generator_state("its state", state, CPU)
    assert torch.equal(checked, state) and checked.data_ptr() != state.data_ptr()
    config = PPOConfig(minibatches=2, epochs=3)
    assert load_settings(PPOConfig, asdict(config)) == load_settings(PPOConfig, config) == config
    assert excerpt(["SLOW", 0.5]) == "['SLOW', 0.5]" and excerpt("x" * 300, 5) == "xxxx…"
