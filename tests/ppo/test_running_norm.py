import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.ppo.running_norm import RunningMeanStd


@given(
    seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 60), max_size=6), scale=st.sampled_from([1e-2, 1.0, 100.0])
)
def test_statistics_are_those_of_all_data_however_they_arrive(seed: int, cuts: list[int], scale: float) -> None:
    data = scale * (1.0 + np.random.default_rng(seed).normal(size=(60, 3)) * [0.5, 1.0, 2.0])
    norm = RunningMeanStd((3,))

    for part in np.split(data, sorted(cuts)):
        norm.update(torch.tensor(part, dtype=torch.float32))

    assert norm.count.item() == 60
    np.testing.assert_allclose(norm.mean.numpy(), data.mean(0), rtol=1e-4, atol=1e-5 * scale)
    np.testing.assert_allclose(norm.var.numpy(), data.var(0), rtol=1e-3)


@pytest.mark.parametrize("constant", [0.0, -1.0, 0.1, 123.4])
def test_a_constant_stream_becomes_0_and_not_noise(constant: float) -> None:
    norm = RunningMeanStd(())
    for _ in range(50):
        norm.update(torch.full((7, 11), constant))

    assert norm(torch.tensor(constant)).item() == pytest.approx(0.0, abs=1e-4)
    # The first different value is measured on its own scale, and not on that of a rounding error.
    assert norm(torch.tensor(constant + 1.0)).item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("place", range(3))
def test_a_batch_whose_statistics_are_not_finite_changes_nothing(bad: float, place: int) -> None:
    norm = RunningMeanStd((3,))
    norm.update(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    batch = torch.zeros(4, 3)
    batch[2, place] = bad

    norm.update(batch)

    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
