"""A network's weights depend on an explicit generator and on nothing else."""

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on, build_seed, initialise, names
from esper_lightning.hosts import CNN

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cnn() -> CNN:
    return CNN((1, 8, 8), 10, base=4)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class Scaled(nn.Module):
    """Owns a parameter of its own and corrects its child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(3))

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.constant_(self.scale, 7.0)
        nn.init.zeros_(self.linear.bias)


class Masked(nn.Module):
    """Owns a buffer that nothing but its constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("mask", torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.mask


def test_the_same_generator_seed_gives_the_same_host() -> None:
    assert same(build_on(CPU, cnn, seeded(3)), build_on(CPU, cnn, seeded(3)))
    assert not same(build_on(CPU, cnn, seeded(3)), build_on(CPU, cnn, seeded(4)))


@pytest.mark.parametrize("blueprint", names("image"))
def test_the_same_generator_seed_gives_the_same_seed(blueprint: str) -> None:
    first, second = (build_seed(blueprint, "image", 8, CPU, seeded(3)) for _ in range(2))
    assert same(first, second)
    assert all(torch.isfinite(value).all() for value in first.state_dict().values())


def test_initialising_a_used_host_makes_it_new() -> None:
    fresh, used = build_on(CPU, cnn, seeded(3)), build_on(CPU, cnn, seeded(8))
    optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
    used(torch.randn(4, 1, 8, 8, generator=seeded())).square().mean().backward()
    optimizer.step()
    assert used.norms[0].num_batches_tracked == 1
    initialise(used, seeded(3))
    assert same(used, fresh)  # BatchNorm's running statistics too


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    host = build_on(CPU, cnn, seeded())
    initialise(host, seeded(1))
    for blueprint in names("image"):
        build_seed(blueprint, "image", 8, CPU, seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_random_state_has_no_influence() -> None:
    hosts = []
    for state in (0, 1):
        torch.manual_seed(state)
        hosts.append(build_on(CPU, cnn, seeded()))
    assert same(*hosts)


@pytest.mark.parametrize(
    ("layer", "bound"),
    [
        (nn.Conv2d(16, 64, 3), 1 / 12),  # 16·9 = 144 inputs
        (nn.Conv2d(64, 64, 5, groups=64), 1 / 5),  # 25 inputs: a channel sees itself alone
        (nn.Linear(100, 30), 1 / 10),
    ],
)
def test_weights_fill_the_usual_interval_evenly(layer: nn.Module, bound: float) -> None:
    initialise(layer, seeded())
    assert 0.97 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.mean().item() == pytest.approx(0.0, abs=0.05 * bound)
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # of a uniform distribution
    assert layer.bias.abs().max() <= bound
    assert layer.bias.std() > 0


def test_layers_without_bias_and_normalisations_are_known() -> None:
    network = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.ReLU()
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(9.0)
    initialise(network, seeded())
    assert network[0].weight.abs().max() <= 0.5
    for norm in network[1:4]:
        assert torch.equal(norm.weight, torch.ones(4))
        assert torch.equal(norm.bias, torch.zeros(4))


def test_a_module_with_its_own_method_has_the_last_word() -> None:
    module = build_on(CPU, Scaled, seeded())
    assert module.scale.tolist() == [7.0] * 3
    assert module.linear.bias.tolist() == [0.0] * 3
    assert module.linear.weight.any()


@pytest.mark.parametrize(
    "module", [nn.Embedding(3, 4), nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), nn.MultiheadAttention(4, 2)]
)
def test_a_module_that_it_does_not_know_is_refused_by_name(module: nn.Module) -> None:
    unknown = module[1] if isinstance(module, nn.Sequential) else module
    message = rf"^cannot initialise a {type(unknown).__name__}: give it a method initialise\(generator\)$"
    with pytest.raises(ValueError, match=message):
        initialise(module, seeded())


def test_a_buffer_that_it_does_not_know_is_refused_too() -> None:
    with pytest.raises(ValueError, match="cannot initialise a Masked"):
        build_on(CPU, Masked, seeded())  # its mask would be whatever lies in memory
