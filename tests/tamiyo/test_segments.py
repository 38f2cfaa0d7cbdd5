import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper_lightning.tamiyo.policy import split_segments


@given(
    steps=st.integers(1, 9), envs=st.integers(1, 4), resets=st.sampled_from([0.0, 0.2, 1.0]), seed=st.integers(0, 999)
)
def test_an_lstm_over_stretches_is_one_that_is_reset_step_by_step(
    steps: int, envs: int, resets: float, seed: int
) -> None:
    """Compare with a loop over single steps, in float64."""
    torch.manual_seed(seed)
    lstm = nn.LSTM(3, 5).double()
    x, hidden, cell = (torch.randn(*shape).double() for shape in ((steps, envs, 3), (envs, 5), (envs, 5)))
    starts = torch.rand(steps, envs) < resets
    starts[0] = False  # the initial state, not a reset, defines the state before the first step

    cut = split_segments(starts)
    begin = cut.initial_states(hidden)[None], cut.initial_states(cell)[None]
    output, (last_hidden, last_cell) = lstm(cut.pack(x), begin)

    expected = []
    for t in range(steps):
        keep = ~starts[t, :, None]
        _, (h, c) = lstm(x[t : t + 1], ((hidden * keep)[None], (cell * keep)[None]))
        hidden, cell = h[0], c[0]
        expected.append(hidden)
    torch.testing.assert_close(cut.unpack(output.data), torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(last_hidden[0, cut.last], hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(last_cell[0, cut.last], cell, rtol=0, atol=1e-12)
