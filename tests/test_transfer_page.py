"""docs/guides/transfer.md: its settings are valid."""

import re
from pathlib import Path

import pytest
import yaml

from tests.runs import CONFIGS, ROOT, cli

PAGE = (ROOT / "docs" / "guides" / "transfer.md").read_text()
(SETTINGS,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_pages_settings_make_a_run(tmp_path: Path) -> None:
    config = tmp_path / "page.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(SETTINGS)))

    built = cli(
        *("--config", str(CONFIGS / "smoke.yaml"), "--config", str(config), "--data.n_envs=2", "--data.env.horizon=2"),
        *("--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.max_epochs=1", "--model.evaluation.hosts=0"),
        *("--trainer.enable_progress_bar=false", "--data.env.training.batches=1"),
    )

    assert built.datamodule.pool.task_slices == {"Digits": slice(0, 2), "table": slice(2, 18)}
