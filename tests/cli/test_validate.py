"""`validate` plays the hosts that `fit` has validated on."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from tests.runs import TINY, fit, only_run


@pytest.mark.parametrize("name", ["last", "best"])
def test_validate_repeats_what_fit_has_logged(name: str, tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")
    run = only_run(tmp_path)
    logged = [value for _, value in run.scalars()["val/objective"]]

    other = ("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'other'}")
    with patch.object(sys, "argv", sys.argv[:1]):
        main(["validate", *TINY, "--ckpt_path", str(run.checkpoints / f"{name}.ckpt"), *other])

    (table,) = (tmp_path / "other").rglob("metrics.csv")
    header, values = (line.split(",") for line in table.read_text().splitlines()[:2])
    found = float(dict(zip(header, values, strict=True))["val/objective"])
    assert found == pytest.approx(logged[-1] if name == "last" else max(logged), abs=1e-6)
