"""Every reward mode trains the policy, is plotted term by term, and is documented where users look for it."""

from pathlib import Path

import pytest

from esper_lightning.envs import EnvConfig
from esper_lightning.rewards import REWARDS
from tests.rewards.ticks import ALL
from tests.runs import EPOCHS, HORIZON, ROOT, cli, fit, only_run
from tests.tiers import rest_is_slow

PAGE = (ROOT / "docs" / "concepts" / "environment.md").read_text().partition("## Rewards")[2]


@pytest.mark.parametrize("mode", rest_is_slow(ALL, {"shaped"}))
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


@pytest.mark.slow
def test_the_discount_of_shaping_is_that_of_ppo(tmp_path: Path) -> None:
    built = fit(tmp_path, "--model.ppo.gamma", "0.9", "--model.ppo.horizon_is_end", "false")
    assert built.model.ppo.gamma == built.datamodule.pool.config.reward.gamma == 0.9
    assert built.datamodule.pool.config.reward.horizon_is_end is False


def test_it_cannot_be_set_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, "--data.env.reward.gamma", "0.5")
    assert "data.env.reward.gamma" in capsys.readouterr().err


def test_every_mode_is_named_in_help_with_its_reward(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--help")
    said = " ".join(capsys.readouterr().out.split())
    *_, option = said.split("--data.env.reward.mode")
    for mode in ALL:
        assert f"{mode}:" in option[:2000], mode
        assert mode in option.partition("}")[0], mode


def test_every_mode_and_every_term_is_on_its_page() -> None:
    modes, _, _ = PAGE.partition("| setting |")
    rows = {line.split("|")[1].strip(" `"): line for line in modes.splitlines() if line.startswith("| `")}
    assert set(rows) == set(ALL)
    for mode in ALL:
        assert not [name for name in REWARDS[mode].terms if f"`{name}`" not in rows[mode]], mode
    assert not [field for field in vars(EnvConfig().reward) if f"`{field}`" not in PAGE]
