"""FLOPs of grown hosts, which are known without running them."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.envs import flops
from esper_lightning.envs.flops import measure_flops
from esper_lightning.growth.blueprints import blueprint_names
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT, MLP

HOSTS = {
    "image": (lambda: CNN((1, 8, 8), 10, base=4, pools=2), torch.randn(1, 1, 8, 8)),
    "sequence": (lambda: GPT((16,), 11, width=8, blocks=2, heads=2), torch.zeros(1, 16, dtype=torch.int64)),
    "vector": (lambda: MLP((6,), 3, width=8), torch.randn(1, 6)),
}


def count_flops(network: nn.Module, x: torch.Tensor) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("layout", HOSTS)
def test_what_a_grown_host_computes_is_known_without_running_it(layout: str) -> None:
    build, x = HOSTS[layout]
    compute = measure_flops(build(), x)
    assert compute.host == count_flops(build().eval(), x) > 0
    for blueprint in blueprint_names(layout):
        network = build().eval()
        for slot in slots_of(network).values():
            germinate(slot, blueprint, generator=torch.Generator().manual_seed(0))
            for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
                slot.move_to(stage)
        grown = compute.host + sum(compute.seed_flops(slot) for slot in slots_of(network).values())
        assert grown == count_flops(network, x), blueprint
        assert grown > compute.host or blueprint == "norm"


def transformer(width: int, hidden: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True), 2)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # Per layer: queries, keys and values; scores and their sums; output; two layers of the perceptron.
        (transformer(16, 24), 2 * (2 * 10 * 16 * 48 + 4 * 10 * 10 * 16 + 2 * 10 * 16 * 16 + 4 * 10 * 16 * 24)),
        (nn.LSTM(16, 8, batch_first=True), 2 * 10 * 4 * 8 * (16 + 8)),
        (nn.GRU(16, 8, batch_first=True), 2 * 10 * 3 * 8 * (16 + 8)),
    ],
    ids=["transformer", "lstm", "gru"],
)
def test_layers_that_torch_fuses_in_evaluation_mode_are_counted(network: nn.Module, expected: int) -> None:
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled

    assert measure_flops(network, torch.randn(1, 10, 16)).host == expected
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == before == (True, True)


def test_the_targets_of_a_network_that_returns_its_loss_first_are_those_of_its_logits() -> None:
    build, tokens = HOSTS["sequence"]
    network = build()
    counted = flops.count_flops(network, lambda: (torch.zeros(()), network(tokens)))

    assert counted.targets == 16


class Forces(nn.Module):
    """Energy, and its derivative by the input, as for molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


def test_a_network_that_returns_a_derivative_is_counted() -> None:
    assert measure_flops(Forces(), torch.randn(1, 6)).host == 2 * 2 * (6 * 8 + 8)  # forward, and back to the input


def test_inference_mode_does_not_change_the_count() -> None:
    build, x = HOSTS["sequence"]
    expected = measure_flops(build(), x)
    with torch.inference_mode():
        assert measure_flops(build(), x) == expected


class Squeezed(nn.Module):
    """With one row `squeeze` also takes the axis of samples away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x[:, None]).squeeze()
        return self.last(hidden.transpose(0, 1).transpose(0, 1))


def test_a_network_that_takes_two_samples_at_least_is_counted() -> None:
    assert measure_flops(Squeezed(), torch.randn(1, 6)).host == 2 * (6 * 8 + 8 * 3)
