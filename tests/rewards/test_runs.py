"""Every reward mode trains the policy and is plotted term by term."""

from pathlib import Path

import pytest

from esper_lightning.envs.rewards import REWARDS
from tests.runs import EPOCHS, HORIZON, fit, only_run
from tests.tiers import rest_is_slow


@pytest.mark.parametrize("mode", rest_is_slow(["objective", "kept", "sparse"], {"kept"}))
def test_a_run_in_every_mode_is_plotted_term_by_term(mode: str, tmp_path: Path) -> None:
    fit(tmp_path, "--data.env.reward.mode", mode)
    points = only_run(tmp_path).scalars()
    shown = {tag.removeprefix("reward/") for tag in points if tag.startswith("reward/")}
    assert shown == {*REWARDS[mode].terms, "rollback"}
    for i, (_, reward) in enumerate(points["hosts/reward"]):
        assert sum(points[f"reward/{name}"][i][1] for name in shown) == pytest.approx(reward, abs=1e-5)
    assert len(points["hosts/reward"]) == EPOCHS * HORIZON
    for i, (_, expected) in enumerate(points["rollout/return"]):
        assert sum(points[f"rollout/reward.{name}"][i][1] for name in shown) == pytest.approx(expected, abs=1e-5)
        episode = slice(i * HORIZON, (i + 1) * HORIZON)
        for name in shown:
            paid = sum(value for _, value in points[f"reward/{name}"][episode])
            assert points[f"rollout/reward.{name}"][i][1] == pytest.approx(paid, abs=1e-5)


def test_it_cannot_be_set_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, "--data.env.reward.gamma", "0.5")
    assert "data.env.reward.gamma" in capsys.readouterr().err
