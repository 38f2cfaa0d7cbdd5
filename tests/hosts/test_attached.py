"""Networks without built-in slots as hosts."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blueprints import build_on, initialise
from esper_lightning.hosts import Attached
from esper_lightning.runtime.registry import import_object
from esper_lightning.tasks import Synthetic
from tests.tiers import rest_is_slow

CPU = torch.device("cpu")
SHAPE = (3, 16, 16)


class Learner(nn.Module):
    """A network with a parameter outside of all layers, and an initialisation that differs from torch's."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width, 1, 1))
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(width, num_classes)
        nn.init.constant_(self.head.bias, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + self.shift).mean((2, 3)))


LEARNER = f"{Learner.__module__}.{Learner.__qualname__}"


def attached(network: str = LEARNER, slots: tuple[str, ...] = ("body",), **settings: Any) -> nn.Module:
    """Build a host on the CPU, with initialised weights."""
    generator = torch.Generator().manual_seed(0)
    return build_on(CPU, lambda: Attached(SHAPE, 5, network=network, slots=list(slots), **settings), generator)


def test_it_begins_as_its_own_constructor_makes_it() -> None:
    host = attached(settings={"width": 6})

    assert torch.equal(host.network.head.bias, torch.full((5,), 0.25))
    assert host.network.shift.shape == (6, 1, 1) and host.network.shift.std() > 0.1


class Tied(nn.Module):
    """A network as GPTs are: a tied output layer, a buffer that checkpoints lack, and a table in an attribute."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(num_classes, width), nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)
        self.body.register_buffer("scale", self.scale, persistent=False)
        self.offset = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x)) * self.body.scale * self.scale + self.offset)


def test_ties_buffers_outside_of_checkpoints_and_plain_tensors_are_those_of_the_constructor() -> None:
    path, x = f"{Tied.__module__}.{Tied.__qualname__}", torch.randint(5, (2, 8))
    make = partial(Attached, (8,), 5, network=path, slots=["body"], tokens=True)
    host = build_on(CPU, make, torch.Generator().manual_seed(0))
    plain = Tied(5)
    plain.load_state_dict(host.network.state_dict())

    assert host.network.head.weight is host.network.tokens.weight
    assert torch.equal(host(x), plain(x))
    assert sum(p.numel() for p in host.parameters()) == sum(p.numel() for p in plain.parameters())


class Viewing(Learner):
    """Network that flattens by `view`, which needs contiguous features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).view(len(x), -1)[:, : self.head.in_features])


def test_features_of_images_are_in_the_memory_format_of_the_setting_with_equal_outputs() -> None:
    x, outputs, seen = torch.randn(4, *SHAPE), [], []

    def note(_: nn.Module, __: Any, feature: Tensor) -> None:
        seen.append(feature.is_contiguous(memory_format=torch.channels_last))

    for memory_format in ("contiguous", "channels_last"):
        host = attached(memory_format=memory_format).eval()
        host.network.body.register_forward_hook(note)
        outputs.append(host(x))
    assert seen == [False, True]
    torch.testing.assert_close(*outputs)


def test_each_seed_draws_its_weights_from_its_own_generator() -> None:
    host, before = attached(), torch.get_rng_state()

    def weights(seed: int) -> Tensor:
        initialise(host, torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in host.parameters()]).detach().clone()

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("network", "slots", "executor"),
    rest_is_slow(
        [
            ("torchvision.models.resnet18", ("layer1", "layer3"), "loop"),
            ("torchvision.models.resnet18", ("layer1", "layer3"), "fused"),
            ("torchvision.models.squeezenet1_1", ("features.3",), "loop"),
            (LEARNER, ("body",), "loop"),
        ],
        lambda case: case[0] != "torchvision.models.resnet18",
    ),
)
def test_networks_of_others_grow_in_a_pool(network: str, slots: tuple[str, ...], executor: str) -> None:
    pool, controller = make_pool(network, slots, executor), RandomValid(0)
    for _ in range(3):
        step = pool.step(controller.act(pool))

    assert pool.space.slot == list(slots)
    assert torch.isfinite(step.metrics.objective).all()
    alone = sum(parameter.numel() for parameter in import_object(network, "network")(num_classes=5).parameters())
    assert pool.envs[0].host_parameters == alone


def make_pool(network: str, slots: tuple[str, ...], executor: str) -> HostPool:
    """Return a pool of two hosts on images of 32×32 pixels."""

    def host(shape: Any, outputs: int) -> nn.Module:
        return Attached(shape, outputs, network=network, slots=list(slots))

    task = Synthetic(shape=(3, 32, 32), classes=5, train=16, validation=8, test=8)
    config = EnvConfig(horizon=3, executor=executor, training=HostTraining(batches=1, batch_size=8, lr=1e-4))
    return HostPool(task, task.load(), host, config=config, n_envs=2, device=CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": "torchvision.models.resnet1"}, r"torchvision.models has no 'resnet1'; did you mean 'resnet1"),
        ({"network": "nonsense.models.net"}, "cannot import 'nonsense.models'"),
        ({"network": "resnet18"}, "'resnet18' is no import path"),
        ({"network": f"{__name__}.Viewing", "memory_format": "channels_last"}, "takes no inputs .*: view size is not"),
        ({"slots": ("bdy",)}, "has no module 'bdy'; did you mean 'body'"),
        ({"classes_as": "classes"}, "unexpected keyword argument 'classes'; see data.host.init_args.settings"),
        ({"network": "builtins.dict"}, "data.host.init_args.network made a dict, not a network"),
        ({"classes_as": None, "settings": {"num_classes": 7}}, r"answers with \[2, 7\], the task has 5 classes"),
        ({"network": "torchvision.models.squeezenet1_1"}, r"takes no inputs \[3, 16, 16\]: Given input size"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attached(**settings)
