"""Stack: blocks, loaders and modules as people write them keep what they have, or are refused in one line."""

import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper_lightning.callbacks import Stack
from tests.callbacks.gpt import trainer

WIDTH, DEPTH, STEPS = 8, 6, 32


class Block(nn.Module):
    """Residual block, which its class builds for its place `i`."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, C] -> [B, C]
        return x + torch.tanh(self.linear(x))


class Lit(LightningModule):
    """Regression through a list of blocks.

    Args:
        block: Class of the blocks, called with their place.
        depth: Number of blocks.
    """

    def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.depths: list[int] = []
        self.blocks = nn.ModuleList(block(i) for i in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, C] -> [B, 1]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def on_before_zero_grad(self, *_: object) -> None:
        self.depths.append(len(self.blocks))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data(width: int = WIDTH) -> DataLoader:
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)


def train(module: LightningModule, *callbacks: Callback, loader: Any = None, **settings: Any) -> Trainer:
    made = trainer(*callbacks, **settings)
    made.fit(module, data() if loader is None else loader)
    return made


def make(*args: Any, kind: type[Lit] = Lit, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args, **settings)


def begins_with(start: int = 2, **settings: Any) -> Stack:
    return Stack("blocks", start=start, **{"at": 0.5, **settings})


def deep_forward(module: Lit) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return module.eval()(x)


# What the class gives a block at its place.


class Masked(Block):
    """Every second block sees every second channel, by a buffer that no state dict holds."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("mask", (torch.arange(WIDTH) % 2 == i % 2).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x * self.mask))


class Windowed(Block):
    """A block whose settings depend on its place: a number, a tensor, a list."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.scale, self.shift, self.order = 1.0 / (i + 1), torch.full((WIDTH,), float(i % 3)), [i % 2, 1 - i % 2]

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(2, 1)
        return x + self.scale * torch.tanh(self.linear(torch.cat([parts[k] for k in self.order], 1) + self.shift))


class Numbered(Block):
    """A block whose inner part knows its place, counted from 1."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.inner = nn.Module()
        self.inner.layer_number = i + 1  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / self.inner.layer_number  # type: ignore[operator]


class Activated(Block):
    """Its activation is of another class in every second block, and its dropout is missing in the first."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.act, self.drop = (nn.ReLU() if i % 2 else nn.Tanh()), (nn.Dropout(0.05 * i) if i else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.linear(x)))


@pytest.mark.parametrize("order", ["stack", "interleave", "middle"])
@pytest.mark.parametrize("block", [Masked, Windowed, Numbered, Activated])
def test_the_plain_class_with_the_last_weights_gives_the_outputs_of_the_grown_network(
    block: type[Block], order: Any
) -> None:
    module = make(block)
    train(module, begins_with(3, order=order))

    plain = Lit(block)
    plain.load_state_dict(module.state_dict())

    assert module.depths == [3] * 16 + [6] * 16
    assert torch.equal(deep_forward(module), deep_forward(plain))


def test_blocks_that_are_one_object_in_the_class_stay_one_and_are_not_overwritten() -> None:
    a, b, c = Block(0), Block(1), Block(2)
    module = make(lambda i: [a, a, b, b, c, c][i])
    before = [block.linear.weight.clone() for block in (a, b)]

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: object) -> None:
            if len(pl_module.blocks) == 6 and not self.seen:
                self.seen = [block.linear.weight.clone() for block in pl_module.blocks]

        seen: list[Tensor] = []  # noqa: RUF012

    look = Look()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    made = train(module, begins_with(3), look)

    assert list(module.blocks) == [a, a, b, b, c, c]
    assert [torch.equal(w, before[k]) for w, k in zip(look.seen, (0, 0, 1, 1), strict=False)] == [True] * 4
    assert any(torch.equal(look.seen[4], w) for w in before)
    held = [id(p) for group in made.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(module.parameters()))


# What a block has that a state dict does not show.


class Ranged(Block):
    """Keeps a range in its extra state, as fp8 layers do."""

    amax = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.amax = state["amax"]

    def forward(self, x: Tensor) -> Tensor:
        self.amax = max(self.amax, float(x.abs().max()))
        return x + torch.tanh(self.linear(x / self.amax))


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Furnished(Ranged):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.dropout, self.checkpointing, self.meter = nn.Dropout(0.1), False, Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.count += 1
        return super().forward(self.dropout(x))


class Changes(Callback):
    """Changes the first block in the training, and looks at its copy right after growth."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.copy: dict[str, Any] = {}

    def see(self, module: nn.Module, *_: object) -> None:
        self.seen.append(id(module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        first = pl_module.blocks[0]
        if trainer.global_step == 3:
            first.dropout.p, first.checkpointing = 0.3, True
            first.linear.bias.requires_grad_(False)
            first.linear.eval()
            first.register_forward_hook(self.see)
        if len(pl_module.blocks) == 6 and not self.copy:
            copied = pl_module.blocks[2]
            self.copy = {
                "dropout": copied.dropout.p,
                "checkpointing": copied.checkpointing,
                "bias learns": copied.linear.bias.requires_grad,
                "mode": copied.linear.training,
                "range": copied.amax == first.amax > 1.0,
                "calls": copied.meter.count == first.meter.count > 0 and copied.meter is not first.meter,
                "second": pl_module.blocks[3].dropout.p,
            }
            self.seen.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: object) -> None:
        if self.copy and "hooks" not in self.copy:
            self.copy["hooks"] = set(self.seen) == {id(pl_module.blocks[i]) for i in (0, 2, 4)}


def test_a_new_block_is_its_source_in_all_that_has_changed_since_the_class_built_them() -> None:
    changes = Changes()

    train(make(Furnished), begins_with(), changes)

    assert changes.copy == {
        "dropout": 0.3,
        "checkpointing": True,
        "bias learns": False,
        "mode": False,
        "range": True,
        "calls": True,
        "second": 0.1,
        "hooks": True,
    }


class Rotary(Block):
    """Its cache takes the size of the data in the first forward pass."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.cache):
            self.cache = torch.ones(len(x))
        return x + torch.tanh(self.linear(x * self.cache[: len(x), None]))


class Observed(Block):
    """Its observer takes the size of the channels in the first forward pass, and a state dict holds it."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().abs().amax(0)
        self.largest = torch.maximum(self.largest, seen) if len(self.largest) else seen
        return x + torch.tanh(self.linear(x))


class Kept(Block):
    """Keeps its activation."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Parametrize(Callback):
    """Changes the structure of the blocks that train."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            for block in pl_module.blocks:
                parametrize.register_parametrization(block.linear, "weight", Double())


@pytest.mark.parametrize(("block", "callbacks"), [(Rotary, []), (Observed, []), (Kept, []), (Block, [Parametrize()])])
def test_blocks_that_change_themselves_in_training_are_grown(block: type[Block], callbacks: list[Callback]) -> None:
    module = make(block)

    train(module, *callbacks, begins_with())

    assert len(module.blocks) == DEPTH and len(module.depths) == STEPS
    last = module.blocks[5].linear
    assert parametrize.is_parametrized(last) == bool(callbacks)
    assert all(p.grad is not None and p.grad.any() for p in last.parameters())


# What modules do before the first batch.


def load(module: Any) -> None:
    module.load_state_dict(make().state_dict())


class LoadsInSetup(Lit):
    def setup(self, stage: str) -> None:
        load(self)


class LoadsInConfigureModel(Lit):
    def configure_model(self) -> None:
        if not self.depths:
            load(self)


class LoadsInConfigureOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        load(self)
        return super().configure_optimizers()


class LoadsInFitStart(Lit):
    def on_fit_start(self) -> None:
        load(self)


class LoadsInTrainStart(Lit):
    def on_train_start(self) -> None:
        load(self)


LOADERS = [LoadsInSetup, LoadsInConfigureModel, LoadsInConfigureOptimizers, LoadsInFitStart, LoadsInTrainStart]


@pytest.mark.parametrize("kind", LOADERS)
def test_weights_that_a_module_loads_itself_are_no_resume(kind: type[Lit]) -> None:
    torch.manual_seed(3)
    module = kind()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    if kind is LoadsInConfigureOptimizers:
        del module.configure_optimizers
    train(module, begins_with(), limit_train_batches=1, max_epochs=1)
    assert len(module.blocks) == 2 and module.depths == [2]
    if kind is not LoadsInConfigureOptimizers:
        assert torch.equal(module.blocks[1].linear.weight, make().blocks[1].linear.weight)


@pytest.mark.parametrize("kind", LOADERS)
def test_loaded_weights_are_not_dropped_without_being_asked(kind: type[Lit]) -> None:
    with pytest.raises(ValueError, match=r"the 6 blocks of 'blocks' hold trained weights.*; give start=2 if that"):
        train(kind(), Stack("blocks"))


class RMS(nn.Module):
    """Normalisation of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(1, keepdim=True).sqrt()


class Normed(Block):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.norm: nn.Module = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class NormedByHand(Normed):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.norm = RMS()


@pytest.mark.parametrize("block", [Normed, NormedByHand])
def test_a_network_that_was_trained_before_is_not_cut_down_without_being_asked(
    block: type[Block], capsys: pytest.CaptureFixture[str]
) -> None:
    module = make(block)
    train(module, max_steps=3)

    with pytest.raises(ValueError, match="hold trained weights, and all but the first 2 would be lost"):
        train(module, Stack("blocks"))
    train(module, begins_with(2), max_steps=3)

    assert "Stack: blocks begins with 2 of 6 blocks" in capsys.readouterr().out


class BuiltInSetup(Lit):
    def setup(self, stage: str) -> None:
        self.blocks = nn.ModuleList(map(Block, range(DEPTH)))


class BuiltInConfigureModel(Lit):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(map(Block, range(DEPTH)))


class BuiltAnew(Lit):
    def configure_model(self) -> None:
        self.blocks = nn.ModuleList(map(Block, range(DEPTH)))


class BuiltLate(Lit):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.blocks = nn.ModuleList(map(Block, range(DEPTH)))
        return super().configure_optimizers()


@pytest.mark.parametrize("kind", [BuiltInSetup, BuiltInConfigureModel, BuiltAnew])
def test_the_list_may_be_built_in_setup(kind: type[Lit]) -> None:
    module = kind()

    train(module, begins_with())

    assert module.depths == [2] * 16 + [6] * 16


def test_a_list_that_is_built_with_the_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="'blocks' was built a second time after setup; build it in __init__"):
        train(BuiltLate(), begins_with())


def test_a_copy_of_the_module_before_its_setup_does_not_copy_the_trainer() -> None:
    class Copies(Callback):
        def __init__(self) -> None:
            self.lock = threading.Lock()  # a copy of the trainer would copy its callbacks

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            assert deepcopy(pl_module) is not pl_module

    train(make(), begins_with(), Copies())


class Counts(Lit):
    """Its forward pass goes by a number that it keeps."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__(block, depth)
        self.num_layers = depth

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.blocks[i](x)
        return self.head(x)


class Forgets(Lit):
    """Its forward pass goes by a number that nobody can find."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


def test_a_network_that_keeps_its_depth_is_told_of_it() -> None:
    module = make(kind=Counts)

    train(module, begins_with())

    assert module.num_layers == 6 and module.depths == [2] * 16 + [6] * 16
    assert all(block.linear.weight.grad.any() for block in module.blocks)


def test_a_forward_pass_that_does_not_run_new_blocks_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"its new blocks 2, 3, 4, 5 got no gradient .* Forgets does not run") as said:
        train(make(kind=Forgets), begins_with())

    assert sum("got no gradient" in str(warning.message) for warning in said) == 1


# Trainings.


class Stream(IterableDataset):
    """A stream of batches whose length nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data().dataset)  # type: ignore[call-overload]


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 40, "limit_train_batches": 10}])
def test_a_training_that_ends_before_the_network_has_grown_says_so(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.should_stop = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(make(), begins_with(), Stop(), loader=DataLoader(Stream(), 4), **settings)

    assert (
        "blocks has 2 of 6 blocks, as no batch was due after at=0.5; build the class with 2" in capsys.readouterr().out
    )


def test_a_loader_without_a_length_is_warned_of_if_epochs_alone_count() -> None:
    with pytest.warns(UserWarning, match="the loader does not tell its length.*; give max_steps"):
        train(make(), begins_with(), loader=DataLoader(Stream(), 4), max_epochs=4)


class Steep(Lit):
    """A loss with a second derivative, as for physics and gradient penalties."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        y = self(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.mse_loss(y, batch[1]) + 0.1 * slope.square().mean()


class Checkpointed(Lit):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(x)


class ByHand(Lit):
    def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__(block, depth)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.log("rate", optimizer.param_groups[0]["lr"])


def flops_of(kind: type[Lit]) -> dict[int, int]:
    callback = begins_with()
    train(make(kind=kind), callback)
    assert callback.cost is not None
    return {depth: callback.cost.flops({callback.name: depth}) for depth in (2, 6)}


def test_flops_are_those_of_the_step_without_what_is_computed_again() -> None:
    plain = flops_of(Lit)

    # A product of each layer in the forward pass and two in the backward pass; the first input has no gradient.
    products = {depth: 3 * depth * WIDTH**2 - WIDTH**2 + 3 * WIDTH for depth in (2, 6)}
    assert plain == {depth: 2 * 4 * number for depth, number in products.items()}
    assert flops_of(Checkpointed) == flops_of(ByHand) == plain
    assert all(more > plain[depth] for depth, more in flops_of(Steep).items())


def test_a_step_that_cannot_run_on_a_copy_is_told_once_and_trains_on() -> None:
    class Locked(Lit):
        def on_fit_start(self) -> None:
            self.steps = (i for i in range(100))  # cannot be copied

    module = make(kind=Locked)
    with pytest.warns(UserWarning, match="the FLOPs of a training step are not known, because") as said:
        train(module, begins_with())

    assert len(module.depths) == STEPS and sum("FLOPs" in str(warning.message) for warning in said) == 1


def test_counting_is_not_noticed_by_the_training() -> None:
    class Noted(Lit):
        def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
            super().__init__(block, depth)
            self.calls: list[Any] = []
            self.head.register_forward_hook(self.note)

        def note(self, *_: object) -> None:
            self.calls.append(torch.rand(()))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert "training_step" not in vars(self)
            batch[0] += 1.0
            return super().training_step(batch, batch_idx)

    module = make(kind=Noted)
    train(module, begins_with())

    assert len(module.calls) == STEPS


class SavesItself(Lit):
    def on_train_epoch_start(self) -> None:
        self.sizes = [len(pickle.dumps(self.blocks))]

    def on_train_batch_end(self, *_: object) -> None:
        self.sizes.append(len(pickle.dumps(self.blocks)))


def test_the_network_can_be_pickled_in_training_and_holds_nothing_of_the_callback() -> None:
    module = make(kind=SavesItself)

    train(module, begins_with())

    assert len(module.sizes) > STEPS / 2 and b"esper" not in pickle.dumps(module.blocks)


def test_blocks_that_differ_are_left_out_and_an_average_grows_along(tmp_path: Path) -> None:
    class First(Block):
        def __init__(self, i: int) -> None:
            super().__init__(i)
            self.i = i
            if i == 0:
                self.extra = nn.Linear(WIDTH, WIDTH)

    module, ema = make(First), EMAWeightAveraging(decay=0.5)
    made = train(module, Stack("blocks[1:]", start=2, at={0.3: 3, 0.5: 5}), ema)

    assert module.depths == [3] * 10 + [4] * 6 + [6] * 16
    assert [block.i for block in module.blocks] == list(range(6))
    made.save_checkpoint(tmp_path / "last.ckpt")
    plain = Lit(First)
    plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])


def test_the_module_itself_may_be_copied_in_the_middle_of_a_training() -> None:
    class Copies(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            copied = deepcopy(pl_module)
            copied.load_state_dict(pl_module.state_dict())

    module = make()
    train(module, Copies(), begins_with())

    assert isinstance(module, L.LightningModule) and len(module.blocks) == 6


# What changes between setup and growth.


class Late(Callback):
    """Changes a module before its first batch."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.change(pl_module)


def share_one_layer(module: Lit) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for block in module.blocks:
        block.linear.weight = layer.weight


def tie_within(module: Lit) -> None:
    for block in module.blocks:
        block.other = nn.Linear(WIDTH, WIDTH)
        block.other.weight = block.linear.weight


def test_what_is_shared_since_setup_is_shared_with_new_blocks() -> None:
    class Tied(Lit):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.change(self)
            return super().configure_optimizers()

    shared, tied = make(kind=Tied), make(kind=Tied)
    shared.change, tied.change = share_one_layer, tie_within
    for module in (shared, tied):
        train(module, begins_with())

    assert len({id(block.linear.weight) for block in shared.blocks}) == 1
    assert all(block.other.weight is block.linear.weight for block in tied.blocks)
    assert len({id(block.linear.weight) for block in tied.blocks}) == DEPTH


def test_a_block_that_moves_leaves_its_own_changes_behind() -> None:
    def change(module: Any) -> None:
        module.blocks[1].dropout.p = 0.5

    module = make(Furnished)
    train(module, Late(change), begins_with(3, order="interleave"))

    assert [block.dropout.p for block in module.blocks] == [0.1, 0.1, 0.5, 0.5, 0.1, 0.1]


class Fading(Block):
    """A number outside of checkpoints that the training changes."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("gain", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain.mul_(0.9)
        return x + self.gain * torch.tanh(self.linear(x))


def test_a_buffer_outside_of_checkpoints_that_the_training_changes_is_taken_along() -> None:
    module = make(Fading)
    train(module, begins_with())

    assert len({round(block.gain.item(), 4) for block in module.blocks}) == 1


def hook_each(module: Any) -> None:
    for block in module.blocks:
        block.register_forward_hook(lambda part, inputs, output, own=block: output * own.linear.weight.norm())


def patch_each(module: Any) -> None:
    for block in module.blocks:
        block.forward = lambda x, before=block.forward: before(x)


def wrap_each(module: Any) -> None:
    for i, block in enumerate(module.blocks):
        module.blocks[i] = nn.Sequential(block)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_each, "_forward_hooks of Block holds a function that refers to its own block"),
        (patch_each, "forward of Block holds a function that refers to its own block"),
        (wrap_each, "blocks of 'blocks' were replaced or added after setup"),
    ],
)
def test_late_changes_that_a_new_block_cannot_have_are_refused(change: Callable[[Any], None], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^Stack: {reason}") as refusal:
        train(make(), begins_with(), Late(change))

    assert "\n" not in str(refusal.value)


class Twice(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.every = nn.ModuleList([*self.blocks, self.head])


class Ordered(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.order = list(self.blocks)


@pytest.mark.parametrize(("kind", "place"), [(Twice, "every.0"), (Ordered, "order")])
def test_blocks_that_the_network_also_has_elsewhere_are_refused(kind: type[Lit], place: str) -> None:
    with pytest.raises(ValueError, match=f"^Stack: blocks of 'blocks' are also in '{place}'"):
        train(kind(), begins_with())


def test_two_callbacks_for_one_list_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Stack: 'blocks\[3:\]' and 'blocks\[:3\]' are one list"):
        train(make(), Stack("blocks[:3]", start=1), Stack("blocks[3:]", start=1))


def test_the_rest_of_an_interrupted_training_is_not_taken_for_the_whole_network() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            raise RuntimeError("interrupted")

    class Predicts(Lit):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0])

    module = make(kind=Predicts)
    with pytest.raises(RuntimeError, match="interrupted"):
        train(module, begins_with(3), Stop())

    (predicted,) = {len(part) for part in trainer(begins_with()).predict(module, data())}
    assert predicted == 4 and len(module.blocks) == 3, "a prediction needs no whole network"
    with pytest.raises(ValueError, match="'blocks' has 3 of the 6 blocks that its class has built"):
        train(module, begins_with())


def test_blocks_that_are_checkpointed_one_after_the_other_are_seen_to_learn() -> None:
    class Reentrant(Lit):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)  # type: ignore[assignment]
            return self.head(x)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*got no gradient.*")
        train(make(kind=Reentrant), begins_with())


def test_counting_leaves_schedulers_and_the_data_as_they_are() -> None:
    class Scheduled(ByHand):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.trainer.lr_scheduler_configs[0].scheduler.step()
            self.trainer.datamodule.seen += 1

    class Data(L.LightningDataModule):
        seen = 0

        def train_dataloader(self) -> DataLoader:
            return data()

    loader = Data()
    made = train(make(kind=Scheduled), begins_with(), loader=loader)

    assert (made.lr_scheduler_configs[0].scheduler.last_epoch, loader.seen) == (STEPS, STEPS)
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.99**STEPS)
