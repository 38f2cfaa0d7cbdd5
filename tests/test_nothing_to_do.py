"""Settings that leave nothing to do."""

from pathlib import Path

import pytest
from lightning import Trainer

from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import EnvConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.tasks import Digits
from tests.runs import fit, tiny_host


def test_nothing_to_do_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F18: horizon, environments, epochs and rollouts must be positive."""
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        EnvConfig(horizon=0)
    with pytest.raises(ValueError, match="n_envs must be at least 1"):
        HostPoolData(Digits(), tiny_host, n_envs=0)
    with pytest.raises(ValueError, match=r"ppo\.epochs must be at least 1"):
        PPOConfig(epochs=0)
    with pytest.raises(ValueError, match=r"trainer\.max_epochs must be at least 1"):
        Trainer(max_epochs=0, logger=False).fit(TamiyoModule(), datamodule=HostPoolData(Digits(), tiny_host))
    with pytest.raises(SystemExit):
        fit(tmp_path / "runs", "--data.env.horizon=0")
    assert "horizon must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
