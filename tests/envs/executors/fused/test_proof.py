"""A host is either trained batched with others exactly as by itself, or refused with a one-line error."""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors.fused.proof import check_batched
from esper_lightning.growth.attach import attach_at
from esper_lightning.growth.export import fold
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, distance, make
from tests.growth.grown import grow
from tests.runs import differences
from tests.tiers import rest_is_slow

Make = Callable[[], nn.Module]


class HostAround(nn.Module):
    """Host of a convolution, a given `middle` module and a slot; on images or on flattened images."""

    def __init__(self, input_shape: Sequence[int], outputs: int, layout: str, middle: Make) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], 8, 3, padding=1)
        self.middle = middle()
        self.slot = SeedSlot("here", layout, 8)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = self.slot(self.middle(x.mean((2, 3)) if self.slot.layout == "vector" else x))
        return self.head(x.square().mean((2, 3)) if x.ndim == 4 else x)


class Using(nn.Module):
    """Module that holds layers and calls a function with them."""

    def __init__(self, use: Callable[["Using", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            setattr(self, name, layer)

    def initialise(self, generator: torch.Generator) -> None:
        """Change nothing: hosts need this method, and the layers have their own initialisation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def calling(function: Callable[[Tensor], Tensor]) -> Make:
    return lambda: Using(lambda _, x: function(x))


def layer() -> nn.Module:
    return nn.Conv2d(8, 8, 1)


def two_names() -> nn.Module:
    one = layer()
    return Using(lambda self, x: self.second(torch.tanh(self.first(x))), first=one, second=one)


def listed() -> nn.Module:
    """Return a module whose layer is in a plain list, unknown to nn.Module, although its weights are trained."""
    module = Using(lambda self, x: self.layers[0](x), layer=nn.Linear(8, 8))
    module.layers = [module.layer]
    return module


def attached(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a plain network whose slot is attached by a hook and bypassed by a shortcut."""
    block = Using(lambda self, x: F.relu(self.norm(self.conv(x)) + x), conv=layer(), norm=nn.BatchNorm2d(8))
    network = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), block, nn.Flatten(), nn.Linear(8 * 9, outputs))
    place = {"slot": "inside", "module": "2.norm", "path": [], "channels_last": False}
    attach_at(network, [place | {"layout": "image", "width": 8, "detach_input": True, "on_single_path": False}])
    return network


def host_around(layout: str, middle: Make) -> Callable[..., nn.Module]:
    return partial(HostAround, layout=layout, middle=middle)


EQUAL: dict[str, Callable[..., nn.Module]] = {
    "attached": attached,
    "batch norm, no weights": host_around("image", partial(nn.BatchNorm2d, 8, affine=False)),
    "one precision alone": host_around("image", calling(lambda x: x.float())),
    "instance norm": host_around("image", calling(F.instance_norm)),
    "group norm of a vector": host_around("vector", partial(nn.GroupNorm, 2, 8)),
    "flattened and back": host_around("image", calling(lambda x: x.reshape(x.shape[0], -1).view(x.shape))),
    "halves of the batch": host_around("image", calling(lambda x: torch.cat([x[:1], x[1:]]))),
    "one layer, twice": host_around(
        "image", lambda: Using(lambda self, x: self.n(self.c(self.n(self.c(x)))), c=layer(), n=nn.BatchNorm2d(8))
    ),
    "in place": host_around("image", lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True))),
}

REFUSED: dict[str, tuple[str, Make, str]] = {
    "dropout": ("image", partial(nn.Dropout, 0.5), "draws random numbers"),
    "python's random numbers": ("image", calling(lambda x: x * random.random()), "outputs in training"),
    "minus the batch": ("image", calling(lambda x: x - x.mean(0)), "rows of a batch see each other"),
    "over the batch's size": ("vector", calling(lambda x: x / len(x)), "rows of a batch see each other"),
    "halves of the channels": ("image", calling(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)), "outputs in training"),
    "layer norm of images": ("image", partial(nn.LayerNorm, [8, 8, 8]), "a LayerNorm over several axes"),
    "batch norm of all batches": ("image", partial(nn.BatchNorm2d, 8, momentum=None), "a BatchNorm2d without momentum"),
    "batch norm of one": ("image", partial(nn.BatchNorm2d, 8, track_running_stats=False), "track_running_stats = Fa"),
    "mirrored": ("image", partial(nn.Conv2d, 8, 8, 3, padding=1, padding_mode="reflect"), "padding_mode = 'reflect'"),
    "transposed": ("image", partial(nn.ConvTranspose2d, 8, 8, 1), "a ConvTranspose2d with weights"),
    "one layer, two names": ("image", two_names, r"middle\.first\.weight and middle\.second\.weight are one weight"),
    "frozen": ("image", lambda: nn.Sequential(layer().requires_grad_(False)), r"middle\.0\.weight does not learn"),
    "unused": ("image", lambda: Using(lambda self, x: x, idle=layer()), r"middle\.idle\.weight is not used"),
    "layers in a list": ("vector", listed, "shapes cannot be multiplied"),
    "viewed": ("image", calling(lambda x: x.view(x.shape[0], -1).view(x.shape)), "view size is not compatible"),
}


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostPool]:
    """Fixture `pool_of(executor, host)`: 3 hosts with plain SGD, since Adam amplifies rounding in zero gradients."""

    def pool(executor: str, host: Callable[..., nn.Module], dtype: torch.dtype = torch.float64) -> HostPool:
        monkeypatch.setitem(HOSTS, "this", host)
        training = replace(FAST_CONFIG.training, optimizer="sgd", lr=0.05)
        actions = replace(FAST_CONFIG.actions, blueprints=["norm"])
        return make(executor, "this", 3, dtype, training=training, actions=actions)

    return pool


def run_some_steps(pool: HostPool) -> None:
    """Run some environment steps with seeds of two kinds."""
    pool.reset(range(3))
    for env, blueprint in zip(pool.envs, pool.space.blueprint[:2], strict=False):
        env.growing.germinate(env.slots[0].name, blueprint)
        pool.train_without_actions(2)


@pytest.mark.parametrize("host", rest_is_slow(EQUAL, list(EQUAL)[::2]))
def test_it_is_trained_as_by_itself(pool_of: Callable[..., HostPool], host: str) -> None:
    dtype, tolerance = (torch.float32, 1e-4) if host == "one precision alone" else (torch.float64, 1e-9)
    pools = [pool_of(name, EQUAL[host], dtype) for name in ("fused", "loop")]
    for pool in pools:
        run_some_steps(pool)
    assert distance(*pools) < tolerance


@pytest.mark.parametrize("middle", rest_is_slow(REFUSED, list(REFUSED)[::2]))
def test_it_is_refused_in_one_line_with_the_way_out(pool_of: Callable[..., HostPool], middle: str) -> None:
    layout, what, reason = REFUSED[middle]
    message = rf"^executor fused cannot batch this host: .*{reason}.*; use env\.executor loop, threads or streams$"
    pool_of("loop", host_around(layout, what))
    with pytest.raises(ValueError, match=message) as error:
        pool_of("fused", host_around(layout, what))

    assert "\n" not in str(error.value)


def test_the_proof_leaves_everything_as_it_was(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("loop", host_around("image", partial(nn.BatchNorm2d, 8)))
    run_some_steps(pool)
    env = pool.envs[0]
    before, torch_state = deepcopy(env.state_dict()), torch.get_rng_state()
    check_batched(env, pool.data.train.inputs)

    assert differences(before, env.state_dict()) == []
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(parameter.grad is not None for parameter in env.network.parameters()), "those of the last minibatch"


def test_a_folded_seed_is_refused(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("fused", host_around("image", nn.Tanh))
    pool.reset(range(3))
    network, slot = pool.envs[1].network, pool.envs[1].slots[0]
    grow(slot, Stage.FOSSILIZED, "conv_light")
    fold(network.double(), pool.data.train.inputs[:2])

    assert slot.folded is not None
    with pytest.raises(ValueError, match=r"^slot 'here': executor fused cannot run a folded seed; use env\.executor"):
        pool.train_without_actions(1)
