"""Runs that Lightning's EarlyStopping ends."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks.early_stopping import EarlyStopping

from tests.runs import HORIZON, fit, load, only_run, with_callback
from tests.tiers import rest_is_slow

PLATEAU = {"monitor": "val/objective", "mode": "max", "patience": 2, "verbose": False}
"""Return a callback that ends a run after two rollouts without a better objective."""


@pytest.mark.parametrize(
    ("min_delta", "rollouts"), rest_is_slow([(10.0, 3), (-10.0, 4)], {(10.0, 3)}), ids=["plateau", "no plateau"]
)
def test_a_run_on_a_plateau_stops_early_and_is_saved(tmp_path: Path, min_delta: float, rollouts: int) -> None:
    """S16: EarlyStopping ends a run whose objective stagnates, after a whole rollout, and that rollout is saved."""
    built = fit(tmp_path, "--trainer.max_epochs=4", *with_callback(EarlyStopping, **PLATEAU, min_delta=min_delta))
    saved = load(only_run(tmp_path).last)

    assert built.trainer.current_epoch == rollouts
    assert saved["callbacks"]["RolloutState"]["loop"]["ticks"] == built.model.collector.ticks == rollouts * HORIZON
