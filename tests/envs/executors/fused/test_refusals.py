"""A host is either trained in a stack exactly as by itself, or refused with a one-line error."""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.executors.fused.equivalence import check_stack
from esper_lightning.envs.executors.fused.layers import StackedConv2d
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.attach import attach_at
from esper_lightning.growth.fold import fold
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, distance, make
from tests.growth.grown import grow
from tests.runs import differences
from tests.tiers import rest_is_slow

Make = Callable[[], nn.Module]

IN_THREADS = r"; use env\.executor loop, threads or streams$"


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


class FunctionModule(nn.Module):
    """Module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class LayersWithFunction(nn.Module):
    """Module that holds layers and calls a function with them."""

    def __init__(self, use: Callable[["LayersWithFunction", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            setattr(self, name, layer)

    def initialise(self, generator: torch.Generator) -> None:
        """Change nothing: hosts need this method, and the layers have their own initialisation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class InitialisedLSTM(nn.LSTM):
    """LSTM with the `initialise` method that hosts need."""

    def initialise(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)


def layer() -> nn.Module:
    return nn.Conv2d(8, 8, 1)


def two_names() -> nn.Module:
    one = layer()
    return LayersWithFunction(lambda self, x: self.second(torch.tanh(self.first(x))), first=one, second=one)


def frozen() -> nn.Module:
    return nn.Sequential(layer().requires_grad_(False), layer())


def listed() -> nn.Module:
    """Return a module whose layer is in a plain list, unknown to nn.Module, although its weights are trained."""
    module = LayersWithFunction(lambda self, x: self.layers[0](x), layer=nn.Linear(8, 8))
    module.layers = [module.layer]
    return module


def attached(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a plain network whose slot is attached by a hook and bypassed by a shortcut."""
    block = LayersWithFunction(
        lambda self, x: F.relu(self.norm(self.conv(x)) + x), conv=layer(), norm=nn.BatchNorm2d(8)
    )
    network = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), block, nn.Flatten(), nn.Linear(8 * 9, outputs))
    place = {"slot": "inside", "module": "2.norm", "path": [], "channels_last": False}
    attach_at(network, [place | {"layout": "image", "width": 8, "detach_input": True, "on_single_path": False}])
    return network


def float32_only(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a host that requires float32."""
    return HostAround(input_shape, outputs, "image", lambda: FunctionModule(lambda x: x.float()))


EQUAL: dict[str, tuple[str, Make]] = {
    "nothing": ("image", nn.Identity),
    "dropout of nothing": ("image", partial(nn.Dropout, 0.0)),
    "batch norm": ("image", partial(nn.BatchNorm2d, 8)),
    "batch norm, no weights": ("image", partial(nn.BatchNorm2d, 8, affine=False)),
    "instance norm": ("image", lambda: FunctionModule(F.instance_norm)),
    "group norm": ("image", partial(nn.GroupNorm, 2, 8)),
    "group norm of a vector": ("vector", partial(nn.GroupNorm, 2, 8)),
    "layer norm": ("vector", partial(nn.LayerNorm, 8)),
    "depthwise": ("image", partial(nn.Conv2d, 8, 8, 3, padding="same", groups=8)),
    "smaller images": ("image", partial(nn.Conv2d, 8, 8, 1, stride=2)),
    "pooled": ("image", partial(nn.AvgPool2d, 2)),
    "shuffled pixels": ("image", lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2))),
    "flattened and back": ("image", lambda: FunctionModule(lambda x: x.reshape(x.shape[0], -1).view(x.shape))),
    "halves of the batch": ("image", lambda: FunctionModule(lambda x: torch.cat([x[:1], x[1:]]))),
    "one layer, twice": (
        "image",
        lambda: LayersWithFunction(lambda self, x: self.n(self.c(self.n(self.c(x)))), c=layer(), n=nn.BatchNorm2d(8)),
    ),
    "in place": ("image", lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True))),
}

REFUSED: dict[str, tuple[str, Make, str]] = {
    "dropout": ("image", partial(nn.Dropout, 0.5), "draws random numbers"),
    "dropout of whole channels": ("image", partial(nn.Dropout2d, 0.5), "draws random numbers"),
    "dropout that hardly ever happens": ("image", partial(nn.Dropout, 1e-9), "draws random numbers"),
    "python's random numbers": ("image", lambda: FunctionModule(lambda x: x * random.random()), "outputs in training"),
    "minus the batch": ("image", lambda: FunctionModule(lambda x: x - x.mean(0)), "outputs for a sample by itself"),
    "over the batch's size": ("vector", lambda: FunctionModule(lambda x: x / len(x)), "outputs for a sample by itself"),
    "sorted": ("vector", lambda: FunctionModule(lambda x: x.sort(0).values), "outputs for a sample by itself"),
    "side by side": (
        "image",
        lambda: LayersWithFunction(
            lambda self, x: torch.cat([self.a(x), self.b(x)], 1), a=nn.Conv2d(8, 4, 1), b=nn.Conv2d(8, 4, 1)
        ),
        "outputs in training",
    ),
    "halves of the channels": (
        "image",
        lambda: FunctionModule(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        "outputs in tr",
    ),
    "softmax over channels": ("image", partial(nn.Softmax2d), "outputs in training"),
    "local response norm": ("image", partial(nn.LocalResponseNorm, 3), "outputs in training"),
    "shuffled channels": ("image", partial(nn.ChannelShuffle, 2), "outputs in training"),
    "layer norm of rows": ("image", partial(nn.LayerNorm, 8), "outputs in training"),
    "linear on rows": ("image", partial(nn.Linear, 8, 8), "outputs in training"),
    "layer norm of images": ("image", partial(nn.LayerNorm, [8, 8, 8]), "a LayerNorm over several axes"),
    "batch norm of all batches": ("image", partial(nn.BatchNorm2d, 8, momentum=None), "a BatchNorm2d without momentum"),
    "batch norm of one": (
        "image",
        partial(nn.BatchNorm2d, 8, track_running_stats=False),
        "track_running_stats = False",
    ),
    "affine instance norm": (
        "image",
        partial(nn.InstanceNorm2d, 8, affine=True),
        "a InstanceNorm2d with weights",
    ),
    "mirrored": ("image", partial(nn.Conv2d, 8, 8, 3, padding=1, padding_mode="reflect"), "padding_mode = 'reflect'"),
    "transposed": ("image", partial(nn.ConvTranspose2d, 8, 8, 1), "a ConvTranspose2d with weights"),
    "PReLU": ("image", nn.PReLU, "a PReLU with weights"),
    "batch norm of vectors": ("vector", partial(nn.BatchNorm1d, 8), "a BatchNorm1d with weights"),
    "LSTM": (
        "vector",
        lambda: LayersWithFunction(lambda self, x: self.lstm(x)[0], lstm=InitialisedLSTM(8, 8)),
        "a InitialisedLSTM with weights",
    ),
    "attention": (
        "vector",
        lambda: LayersWithFunction(lambda self, x: self.attend(x, x, x)[0], attend=nn.MultiheadAttention(8, 2)),
        "a MultiheadAttention with weights",
    ),
    "convolution of lines": (
        "vector",
        lambda: LayersWithFunction(lambda self, x: self.line(x[:, :, None])[:, :, 0], line=nn.Conv1d(8, 8, 1)),
        "a Conv1d with weights",
    ),
    "one layer, two names": ("image", two_names, r"middle\.first\.weight and middle\.second\.weight are one weight"),
    "frozen": ("image", frozen, r"middle\.0\.weight does not learn"),
    "unused": (
        "image",
        lambda: LayersWithFunction(lambda self, x: x, idle=layer()),
        r"middle\.idle\.weight is not used",
    ),
    "layers in a list": ("vector", listed, "shapes cannot be multiplied"),
    "viewed": (
        "image",
        lambda: FunctionModule(lambda x: x.view(x.shape[0], -1).view(x.shape)),
        "view size is not compatible",
    ),
}


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostPool]:
    """Fixture `pool_of(executor, host)`: 3 hosts with plain SGD, since Adam amplifies rounding in zero gradients."""

    def pool(
        executor: str, host: Callable[[Sequence[int], int], nn.Module], dtype: torch.dtype = torch.float64
    ) -> HostPool:
        monkeypatch.setitem(HOSTS, "this", host)
        training = replace(FAST_CONFIG.training, optimizer="sgd", lr=0.05)
        return make(
            executor, "this", 3, dtype, training=training, actions=replace(FAST_CONFIG.actions, blueprints=["norm"])
        )

    return pool


def run_some_steps(pool: HostPool) -> None:
    """Run some environment steps with seeds of two kinds."""
    pool.reset(range(3))
    for env, style in zip(pool.envs, ("gate", "add"), strict=False):
        env.growing.germinate(env.slots[0].name, "norm", style=style)
        pool.train_without_actions(2)


def assert_equal(pool_of: Callable[..., HostPool], host: Callable[..., nn.Module]) -> None:
    fused, loop = (pool_of(name, host) for name in ("fused", "loop"))
    for pool in (fused, loop):
        run_some_steps(pool)
    assert distance(fused, loop) < 1e-9


@pytest.mark.parametrize("middle", rest_is_slow(EQUAL, list(EQUAL)[::2]))
def test_it_is_trained_as_by_itself(pool_of: Callable[..., HostPool], middle: str) -> None:
    layout, what = EQUAL[middle]
    assert_equal(pool_of, partial(HostAround, layout=layout, middle=what))


def test_pixels_that_are_equal_are_no_reason_to_refuse(make_pool: Callable[..., HostPool]) -> None:
    """With equal pixels rounding decides which of them a max-pool selects."""
    make_pool(1, executor="fused", actions=ActionConfig(), training=HostTraining(onednn=False))


def test_slots_may_hang_on_any_network(pool_of: Callable[..., HostPool]) -> None:
    assert_equal(pool_of, attached)


def test_a_host_that_runs_in_one_precision_alone_is_shown_to_be_right_in_it(pool_of: Callable[..., HostPool]) -> None:
    fused, loop = (pool_of(name, float32_only, torch.float32) for name in ("fused", "loop"))
    for pool in (fused, loop):
        run_some_steps(pool)
    assert distance(fused, loop) < 1e-4


@pytest.mark.parametrize("middle", rest_is_slow(REFUSED, list(REFUSED)[::2]))
def test_it_is_refused_in_one_line_with_the_way_out(pool_of: Callable[..., HostPool], middle: str) -> None:
    layout, what, reason = REFUSED[middle]
    host = partial(HostAround, layout=layout, middle=what)
    pool_of("loop", host)
    with pytest.raises(ValueError, match=rf"^executor fused cannot stack this host: .*{reason}.*{IN_THREADS}") as error:
        pool_of("fused", host)

    assert "\n" not in str(error.value)


def test_what_is_proven_is_the_method_of_convolution_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StackedConv2d._patch_product
    monkeypatch.setattr(StackedConv2d, "_patch_product", lambda layer, x: 2.0 * compute(layer, x))
    monkeypatch.setitem(HOSTS, "this", partial(HostAround, layout="image", middle=nn.Identity))
    actions = replace(FAST_CONFIG.actions, blueprints=["norm"])

    with pytest.raises(ValueError, match=r"^executor fused cannot stack this host: .* are off by"):
        make("fused", "this", 1, actions=actions, training=replace(FAST_CONFIG.training, convolutions="products"))


def test_a_method_of_convolution_needs_executor_fused() -> None:
    match = r"^training\.convolutions is for executor fused, not loop; use env.executor fused, or leave it out$"
    with pytest.raises(ValueError, match=match):
        make("loop", "cnn", 1, training=replace(FAST_CONFIG.training, convolutions="grouped"))


def test_the_proof_leaves_everything_as_it_was(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("loop", partial(HostAround, layout="image", middle=partial(nn.BatchNorm2d, 8)))
    run_some_steps(pool)
    env = pool.envs[0]
    before, torch_state = deepcopy(env.state_dict()), torch.get_rng_state()
    check_stack(env, pool.data.train.inputs)

    assert differences(before, env.state_dict()) == []
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(parameter.grad is not None for parameter in env.network.parameters()), "those of the last minibatch"


def test_a_folded_seed_is_refused(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("fused", partial(HostAround, layout="image", middle=nn.Tanh))
    pool.reset(range(3))
    network, slot = pool.envs[1].network, pool.envs[1].slots[0]
    grow(slot, Stage.FOSSILIZED, "conv_light")
    fold(network.double(), pool.data.train.inputs[:2])

    assert slot.folded is not None
    with pytest.raises(
        ValueError, match=r"^slot 'here': executor fused cannot run a folded seed; use env\.executor loop$"
    ):
        pool.train_without_actions(1)
