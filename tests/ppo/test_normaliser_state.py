"""Statistics of the normalisers in a checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.runs import fit, load, only_run


@pytest.mark.slow
def test_a_checkpoint_holds_all_statistics_of_the_normalisers(tmp_path: Path) -> None:
    """F7: mean, variance and count of both normalisers are buffers of the module, and so in its checkpoint."""
    built = fit(tmp_path, "--trainer.max_epochs", "1")
    saved = load(only_run(tmp_path).last)["state_dict"]

    for name in ("observation_norm", "value_norm"):
        norm = getattr(built.model, name)
        assert {part for part, _ in norm.named_buffers()} == {"mean", "var", "count"}
        for part, value in norm.named_buffers():
            assert torch.equal(saved[f"{name}.{part}"], value)
        assert saved[f"{name}.count"] == 2 * 5  # hosts times environment steps
