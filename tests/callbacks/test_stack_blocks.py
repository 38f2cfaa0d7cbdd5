"""Stack: blocks, loaders and modules as people write them keep what they have, or are refused in one line."""

import pickle
import random
import re
import threading
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import Progress
from esper_lightning.envs.flops import FlopCounter
from esper_lightning.growth.stack import sources_of
from tests.callbacks import gpt
from tests.callbacks.gpt import trainer

WIDTH, DEPTH, STEPS = 8, 6, 32

GROWN = [2] * 16 + [6] * 16
"""Blocks after each step of a training that begins with two and grows in its middle."""


class Block(nn.Module):
    """Residual block, which its class builds for its place `i`."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def see(self, x: Tensor) -> Tensor:
        """Return what the layer of the block gets."""
        return x

    def forward(self, x: Tensor) -> Tensor:  # [B, C] -> [B, C]
        return x + torch.tanh(self.linear(self.see(x)))


class Lit(LightningModule):
    """Regression through a list of blocks.

    Args:
        block: Class of the blocks, called with their place.
    """

    rate = 0.01

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.depths: list[int] = []
        self.blocks = nn.ModuleList(map(block, range(DEPTH)))
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
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def doing(hook: str, action: Callable[[Any], Any]) -> type[Lit]:
    """Return a class whose modules do something in one of their hooks."""

    def does(self: Lit, *args: Any, **given: Any) -> Any:
        action(self)
        return getattr(super(kind, self), hook)(*args, **given)

    kind = type("Doing", (Lit,), {hook: does})
    return kind


def data() -> DataLoader:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)


def train(module: LightningModule, *callbacks: Callback, loader: Any = None, **settings: Any) -> Trainer:
    made = trainer(*callbacks, **settings)
    made.fit(module, data() if loader is None else loader)
    return made


def make(*args: Any, kind: type[Lit] = Lit) -> Any:
    torch.manual_seed(0)
    return kind(*args)


def begins_with(start: int = 2, **settings: Any) -> Stack:
    return Stack("blocks", start=start, **{"at": 0.5, **settings})


# What the class gives a block at its place.


class Placed(Block):
    """A block whose settings depend on its place: two buffers, of which a state dict holds one, a number, a tensor, a
    list, the number of an inner part, counted from 1, the classes of its activation and its dropout, and what its
    first forward pass computes from the number."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("mask", (torch.arange(WIDTH) % 2 == i % 2).float())
        self.register_buffer("offset", torch.ones(WIDTH) if i % 3 == 1 else None, persistent=False)
        self.scale, self.shift, self.order = 1.0 / (i + 1), torch.full((WIDTH,), float(i % 3)), [i % 2, 1 - i % 2]
        self.register_buffer("table", None, persistent=False)
        self.width, self.row, self.cache = 0, None, {}
        self.inner: Any = nn.Module()
        self.inner.layer_number = i + 1
        self.act, self.drop = (nn.ReLU() if i % 2 else nn.Tanh()), (nn.Dropout(0.05 * i) if i else nn.Identity())

    def see(self, x: Tensor) -> Tensor:
        if self.width != WIDTH:
            self.width = WIDTH
            self.table, self.row = torch.full((WIDTH,), self.scale), torch.full((WIDTH,), self.scale)
            self.cache[WIDTH] = torch.full((WIDTH,), self.scale)
        self.shift = self.shift.double().to(x.dtype)
        parts = (x * self.mask if self.offset is None else x + self.offset).chunk(2, 1)
        x = self.table * self.row * self.cache[WIDTH] * torch.cat([parts[k] for k in self.order], 1) + self.shift
        return self.drop(self.act(x)) / self.inner.layer_number


@pytest.mark.parametrize("order", ["stack", "interleave", "middle"])
def test_the_plain_class_with_the_last_weights_gives_the_outputs_of_the_grown_network(order: Any) -> None:
    module = make(Placed)
    train(module, begins_with(3, order=order))

    plain = Lit(Placed)
    plain.load_state_dict(module.state_dict())

    assert module.depths == [3] * 16 + [6] * 16
    x = next(iter(data()))[0]
    assert torch.equal(module.eval()(x), plain.eval()(x))
    assert all(torch.equal(block.mask, Placed(i).mask) for i, block in enumerate(module.blocks))


@pytest.mark.parametrize("order", ["stack", "interleave", "middle"])
def test_blocks_with_a_parameter_group_each_are_in_those_of_their_sources_and_nowhere_else(order: Any) -> None:
    class Layerwise(Lit):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            groups = [{"params": [*x.named_parameters(f"blocks.{i}")], "lr": i} for i, x in enumerate(self.blocks)]
            return torch.optim.SGD(groups)

    module = make(kind=Layerwise)
    module.blocks.requires_grad_(False)  # rates tell the groups apart, and nothing moves by them
    rates = list[float]()

    made = train(module, begins_with(3, order=order))

    for i, block in enumerate(module.blocks):
        for name, parameter in block.named_parameters():
            groups = [g for g in made.optimizers[0].param_groups if any(p is parameter for p in g["params"])]
            assert len(groups) == 1
            held = dict(zip(map(id, groups[0]["params"]), groups[0]["param_names"], strict=True))
            assert held[id(parameter)] == f"blocks.{i}.{name}"
        rates.append(groups[0]["lr"])
    assert rates == sources_of(3, 6, order)


def test_blocks_that_are_one_object_in_the_class_stay_one_and_are_not_overwritten() -> None:
    a, b, c = Block(0), Block(1), Block(2)
    module = make(lambda i: [a, a, b, b, c, c][i])
    module.rate = 0.0
    before = [block.linear.weight.clone() for block in (a, b)]

    made = train(module, begins_with(3))

    assert list(module.blocks) == [a, a, b, b, c, c]
    assert torch.equal(a.linear.weight, before[0]) and torch.equal(b.linear.weight, before[1])
    assert any(torch.equal(c.linear.weight, weight) for weight in before)
    held = [id(p) for group in made.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(module.parameters()))


# What a block has that a state dict does not show.


class Furnished(Block):
    """Keeps a range in its extra state, as fp8 layers do, a meter, and a buffer that no state dict holds."""

    amax = 1.0

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.dropout, self.checkpointing, self.meter = nn.Dropout(0.1), False, Namespace(count=0)
        self.register_buffer("gain", torch.ones(()), persistent=False)

    def get_extra_state(self) -> dict[str, float]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.amax = state["amax"]

    def see(self, x: Tensor) -> Tensor:
        self.meter.count += 1
        self.gain.mul_(0.9)
        x = self.dropout(x)
        self.amax = max(self.amax, float(x.abs().max()))
        return self.gain * x / self.amax


def test_a_new_block_is_its_source_in_all_that_has_changed_since_the_class_built_them() -> None:
    module, seen = make(Furnished), []

    def change_and_look(trainer: Trainer, *_: object) -> None:
        first = module.blocks[0]
        if trainer.global_step == 3:
            first.dropout.p, first.checkpointing = 0.3, True
            first.linear.bias.requires_grad_(False)
            first.linear.eval()
            first.register_forward_hook(lambda part, *_: seen.append(id(part)))
        if trainer.global_step == STEPS // 2:
            copied = module.blocks[2]
            assert copied.dropout.p == 0.3 and copied.checkpointing
            assert not copied.linear.bias.requires_grad and not copied.linear.training
            assert copied.amax == first.amax > 1.0 and copied.gain == first.gain < 1.0
            assert copied.meter.count == first.meter.count > 0 and copied.meter is not first.meter
            assert module.blocks[3].dropout.p == 0.1
            seen.clear()

    train(module, begins_with(), LambdaCallback(on_train_batch_start=change_and_look))

    assert Counter(seen) == {id(module.blocks[i]): STEPS // 2 for i in (0, 2, 4)}


class Restless(Block):
    """Its cache, and its observer, which a state dict holds, take the size of the data in the first forward pass, and
    it keeps its activation."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("largest", torch.zeros(0))

    def see(self, x: Tensor) -> Tensor:
        if len(x) > len(self.cache):
            self.cache = torch.ones(len(x))
        seen = x.detach().abs().amax(0)
        self.largest = torch.maximum(self.largest, seen) if len(self.largest) else seen
        self.last = x * self.cache[: len(x), None]
        return self.last


def test_blocks_that_change_themselves_in_training_are_grown() -> None:
    def compute_weights(trainer: Trainer, pl_module: Any, *_: object) -> None:
        for block in pl_module.blocks if trainer.global_step == 3 else []:
            parametrize.register_parametrization(block.linear, "weight", nn.Identity())

    module = make(Restless)

    train(module, LambdaCallback(on_train_batch_start=compute_weights), begins_with())

    assert module.depths == GROWN and parametrize.is_parametrized(module.blocks[5].linear)
    assert all(p.grad is not None and p.grad.any() for p in module.blocks[5].parameters())


# What modules do before the first batch.


def load(module: Any) -> None:
    module.load_state_dict(make().state_dict())


@pytest.mark.parametrize("hook", ["setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"])
def test_weights_that_a_module_loads_itself_are_no_resume_and_not_dropped_without_being_asked(
    hook: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    module = doing(hook, load)()
    module.rate = 0.0
    train(module, begins_with(), limit_train_batches=1, max_epochs=1)

    assert len(module.blocks) == 2 and module.depths == [2]
    assert torch.equal(module.blocks[1].linear.weight, make().blocks[1].linear.weight)
    assert "Stack: blocks begins with 2 of 6 blocks" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"the 6 blocks of 'blocks' hold trained weights.*; give start=1 if that"):
        train(doing(hook, load)(), Stack("blocks"))


def build(module: Any) -> None:
    module.blocks = nn.ModuleList(map(Block, range(DEPTH)))


@pytest.mark.parametrize(
    ("hook", "is_there_before"), [("setup", True), ("configure_model", True), ("configure_model", False)]
)
def test_the_list_may_be_built_in_setup(hook: str, is_there_before: bool) -> None:
    module = doing(hook, build)()
    if not is_there_before:
        del module.blocks

    train(module, begins_with())

    assert module.depths == GROWN


def test_the_module_may_be_copied_before_its_setup_without_the_trainer_and_in_the_middle_of_a_training() -> None:
    def copy(trainer: Trainer, pl_module: Any, *_: object, **__: object) -> None:
        copied = deepcopy(pl_module)
        copied.load_state_dict(pl_module.state_dict())

    module, callback = make(), LambdaCallback(setup=copy, on_train_batch_end=copy)
    callback.lock = threading.Lock()  # a copy of the trainer would copy its callbacks
    train(module, begins_with(), callback)

    assert isinstance(module, L.LightningModule) and module.depths == GROWN


# Trainings.


class Stream(IterableDataset):
    """A stream of batches whose length nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data().dataset)  # type: ignore[call-overload]


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 40, "limit_train_batches": 10}])
def test_a_training_that_ends_before_the_network_has_grown_says_so(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(trainer: Trainer, *_: object) -> None:
        trainer.should_stop = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stops = LambdaCallback(on_train_epoch_end=stop)
        train(make(), begins_with(), stops, loader=DataLoader(Stream(), 4), **settings)

    told = "blocks has 2 of 6 blocks, as no batch was due after at=0.5; build the class with 2"
    assert told in capsys.readouterr().out


def test_a_loader_without_a_length_is_warned_of_if_epochs_alone_count() -> None:
    with pytest.warns(UserWarning, match="the loader does not tell its length.*; give max_steps"):
        train(make(), begins_with(), loader=DataLoader(Stream(), 4), max_epochs=4)


class Forgets(Lit):
    """Its forward pass goes by a number that nobody can find."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


class Steep(Lit):
    """A loss with a second derivative, as for physics and gradient penalties."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        y = self(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.mse_loss(y, batch[1]) + 0.1 * slope.square().mean()


class Checkpointed(Lit):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.head(x)


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
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


@pytest.mark.parametrize("kind", [Forgets, Checkpointed, type("Reentrant", (Checkpointed,), {"reentrant": True})])
def test_a_forward_pass_that_does_not_run_new_blocks_is_warned_of_once(
    kind: type[Lit], recwarn: pytest.WarningsRecorder
) -> None:
    train(make(kind=kind), begins_with())

    said = [str(warning.message) for warning in recwarn if "got no gradient" in str(warning.message)]
    assert len(said) == (kind is Forgets)
    assert all(re.search("its new blocks 2, 3, 4, 5 .* Forgets does not run", line) for line in said)


def test_a_step_that_cannot_run_on_a_copy_is_told_once_and_trains_on() -> None:
    """F19: a diagnostic that fails says so once, and is switched off."""
    locked = doing("on_fit_start", lambda module: setattr(module, "steps", (i for i in range(100))))  # not copied
    module = make(kind=locked)
    with pytest.warns(UserWarning, match="the FLOPs of a training step are not known, because") as said:
        train(module, begins_with())

    assert len(module.depths) == STEPS and sum("FLOPs" in str(warning.message) for warning in said) == 1


class Noted(ByHand):
    """Counts its calls and its batches in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.drawn = [], []
        self.head.register_forward_hook(lambda *_: self.calls.append(torch.rand(())))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert "training_step" not in vars(self)
        batch[0] += 1.0
        super().training_step(batch, batch_idx)
        self.trainer.lr_scheduler_configs[0].scheduler.step()
        self.trainer.datamodule.seen += 1
        self.drawn += self.trainer.datamodule.draw()


class Data(L.LightningDataModule):
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.torch = torch.Generator().manual_seed(0)

    def draw(self) -> list[float]:
        return [self.python.random(), self.numpy.random(), float(torch.rand((), generator=self.torch))]

    def train_dataloader(self) -> DataLoader:
        return data()


def test_counting_leaves_hooks_batches_schedulers_and_generators_as_they_are() -> None:
    module, loader, again = make(kind=Noted), Data(), Data()
    made = train(module, begins_with(), loader=loader)

    assert (made.lr_scheduler_configs[0].scheduler.last_epoch, loader.seen) == (STEPS, STEPS)
    assert len(module.calls) == STEPS
    assert module.drawn == [number for _ in range(STEPS) for number in again.draw()]
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.99**STEPS)


def test_the_network_can_be_pickled_in_training_and_holds_nothing_of_the_callback() -> None:
    module, sizes = make(), []

    save = LambdaCallback(on_train_batch_end=lambda *_: sizes.append(len(pickle.dumps(module.blocks))))

    train(module, begins_with(), save)

    assert len(sizes) == STEPS and b"esper" not in pickle.dumps(module.blocks)


@pytest.mark.parametrize(("blocks", "other"), [("blocks[1:]", 0), ("blocks[:-1]", 5)])
def test_blocks_that_differ_are_left_out_and_an_average_grows_along(blocks: str, other: int, tmp_path: Path) -> None:
    class First(Block):
        def __init__(self, i: int) -> None:
            super().__init__(i)
            self.i, self.extra = i, nn.Linear(WIDTH, WIDTH) if i == other else nn.Identity()

    module, ema = make(First), EMAWeightAveraging(decay=0.5)
    module.layer_types = list("abcdef")
    indices: list[list[int]] = []
    types: list[str] = []

    def look(*_: object) -> None:
        indices.append([block.i for block in module.blocks])
        types.append("".join(module.layer_types))

    note = LambdaCallback(on_train_batch_start=look)
    made = train(module, Stack(blocks, start=2, at={0.3: 3, 0.5: 5}), ema, note)

    assert module.depths == [3] * 10 + [4] * 6 + [6] * 16
    assert indices == [list(range(depth)) for depth in module.depths]
    assert list(dict.fromkeys(types)) == (["abc", "abcd", "abcdef"] if other == 0 else ["abf", "abcf", "abcdef"])
    made.save_checkpoint(tmp_path / "last.ckpt")
    plain = Lit(First)
    plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])


# What changes between setup and growth.


def late(change: Callable[[Any], None]) -> Callback:
    """Return a callback that changes a module before its first batch."""
    return LambdaCallback(on_train_start=lambda trainer, module: change(module))


def share_one_layer(module: Lit) -> None:
    """Share a weight among all blocks, and another parameter within each block."""
    layer = nn.Linear(WIDTH, WIDTH)
    for block in module.blocks:
        block.linear.weight, block.other = layer.weight, nn.LayerNorm(WIDTH)
        block.other.weight = block.linear.bias


def test_what_is_shared_since_setup_is_shared_with_new_blocks() -> None:
    module = make(kind=doing("configure_optimizers", share_one_layer))
    train(module, begins_with())

    assert len({id(block.linear.weight) for block in module.blocks}) == 1
    assert all(block.other.weight is block.linear.bias for block in module.blocks)
    assert len({id(block.linear.bias) for block in module.blocks}) == DEPTH


class Outputs:
    """Object of no module of torch, to which blocks report."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []


class Reporting(Block):
    def __init__(self, i: int, outputs: Outputs) -> None:
        super().__init__(i)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.outputs.means.append(y.mean())  # it holds the graph of the step
        return y


def test_an_object_of_all_blocks_that_changes_in_training_stays_one() -> None:
    outputs = Outputs()
    module = make(lambda i: Reporting(i, outputs), kind=doing("training_step", lambda module: outputs.means.clear()))
    train(module, begins_with(1))

    assert all(block.outputs is outputs for block in module.blocks) and len(outputs.means) == DEPTH


class SpectralNorm(Block):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        nn.utils.parametrizations.spectral_norm(self.linear)


def test_a_computed_weight_that_changes_when_it_is_read_is_not_read() -> None:
    module, seen = make(SpectralNorm), {}
    built = deepcopy(module.blocks[:2].state_dict())
    look = LambdaCallback(
        on_train_batch_start=lambda _, lit, *__: seen or seen.update(deepcopy(lit.blocks.state_dict()))
    )
    train(module, begins_with(), look, max_steps=4)

    assert gpt.equal(seen, built)


class PartlySaved(Lit):
    """Its frozen block is in no checkpoint."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def state_dict(self, *args: Any, **settings: Any) -> dict[str, Any]:
        learn = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: x for name, x in super().state_dict(*args, **settings).items() if name in learn}

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.depths.append(len(self.blocks))


def test_a_checkpoint_that_leaves_frozen_blocks_out_has_the_depth_of_its_last_block(tmp_path: Path) -> None:
    train(make(kind=PartlySaved), begins_with(order="last")).save_checkpoint(tmp_path / "last.ckpt")

    module = make(kind=PartlySaved)
    trainer(begins_with(order="last")).test(module, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert set(module.depths) == {DEPTH}


class TwoLists(Lit):
    """Two lists, which read their lengths from one configuration, or from two."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Module(), nn.Module()
        self.student.config = Namespace(n_layer=DEPTH)
        self.teacher.config = self.student.config if is_shared else deepcopy(self.student.config)
        self.student.blocks, self.teacher.blocks = self.blocks, deepcopy(self.blocks)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.student.blocks:
            x = block(x)
        for block in self.teacher.blocks[: self.teacher.config.n_layer]:
            x = block(x)
        return self.head(x)

    def on_before_zero_grad(self, *_: object) -> None:
        self.depths.append(self.teacher.config.n_layer)


@pytest.mark.parametrize("is_shared", [False, True])
def test_another_list_whose_length_is_the_same_setting_is_warned_of(
    is_shared: bool, recwarn: pytest.WarningsRecorder
) -> None:
    module = make(is_shared, kind=TwoLists)
    train(module, Stack("student.blocks", start=2, at=0.5))

    said = [str(w.message) for w in recwarn if "is that of 'teacher.blocks', too" in str(w.message)]
    assert len(said) == is_shared and set(module.depths) == ({2, DEPTH} if is_shared else {DEPTH})


def test_a_block_that_moves_leaves_its_own_changes_behind() -> None:
    module, change = make(Furnished), late(lambda module: setattr(module.blocks[1].dropout, "p", 0.5))
    train(module, change, begins_with(3, order="interleave"))

    assert [block.dropout.p for block in module.blocks] == [0.1, 0.1, 0.5, 0.5, 0.1, 0.1]


def hook_each(module: Any) -> None:
    for block in module.blocks:
        block.register_forward_hook(lambda part, inputs, output, own=block: output * own.linear.weight.norm())


def patch_each(module: Any) -> None:
    for block in module.blocks:
        block.forward = lambda x, before=block.forward: before(x)


def wrap_each(module: Any) -> None:
    for i, block in enumerate(module.blocks):
        module.blocks[i] = nn.Sequential(block)


def holding(what: Callable[[Any], Any]) -> type[Lit]:
    return doing("setup", lambda module: setattr(module, "held", what(module)))


@pytest.mark.parametrize(
    ("kind", "callbacks", "reason"),
    [
        (Lit, [begins_with(), late(hook_each)], "_forward_hooks of Block holds a function that refers to its own"),
        (Lit, [begins_with(), late(patch_each)], "forward of Block holds a function that refers to its own block"),
        (Lit, [begins_with(), late(wrap_each)], "blocks of 'blocks' were replaced or added after setup"),
        (doing("configure_optimizers", build), [begins_with()], "'blocks' was built a second time after setup; build"),
        (holding(lambda module: nn.ModuleList(module.blocks)), [begins_with()], ".* are also in 'held.0'"),
        (holding(lambda module: list(module.blocks)), [begins_with()], "blocks of 'blocks' are also in 'held'"),
        (
            holding(lambda module: [[*enumerate(module.blocks)]]),
            [begins_with()],
            "blocks of 'blocks' are also in 'held'",
        ),
        (holding(lambda module: [x.forward for x in module.blocks]), [begins_with()], ".* are also in 'held'"),
        (Lit, [Stack("blocks[:3]"), Stack("blocks[3:]")], r"'blocks\[3:\]' and 'blocks\[:3\]' are one list"),
    ],
)
def test_what_new_blocks_cannot_have_or_cannot_be_kept_out_of_is_refused(
    kind: type[Lit], callbacks: list[Callback], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^Stack: {reason}") as refusal:
        train(kind(), *callbacks)

    assert "\n" not in str(refusal.value)


class Projects(Callback):
    """Holds layers of the blocks that are there when the training begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.layers = {i: block.linear for i, block in enumerate(pl_module.blocks)}


class Grouped(Lit):
    """Keeps the groups of its optimizer, which follow the network."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.held = [{"params": [*self.blocks.parameters()]}, {"params": [*self.head.parameters()], "lr": 0.1}]
        return torch.optim.SGD(self.held, lr=0.01)


@pytest.mark.parametrize(
    ("kind", "callbacks", "told"),
    [
        (
            holding(lambda module: [x.linear for x in module.blocks]),
            [],
            "'held' holds parts of all 6 blocks of 'blocks', ",
        ),
        (
            doing("configure_optimizers", lambda module: setattr(module, "held", [*module.parameters()])),
            [],
            "'held' holds parts of the blocks that 'blocks' has now, and not of later ones",
        ),
        (Lit, [Projects()], "'Projects.layers' holds parts of the blocks that 'blocks' has now"),
        (holding(lambda module: [module.blocks[0].linear]), [], None),
        (Grouped, [], None),
        (Lit, [], None),
    ],
)
def test_parts_of_blocks_that_are_kept_elsewhere_are_told_of(
    kind: type[Lit], callbacks: list[Callback], told: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    train(kind(), begins_with(), *callbacks)

    said = [text for warning in recwarn if " holds parts of " in (text := str(warning.message))]
    assert [text.startswith(f"Stack: {told}") for text in said] == [True] * (told is not None)


def test_the_rest_of_an_interrupted_training_is_not_taken_for_the_whole_network() -> None:
    module = make(kind=type("Predicts", (Lit,), {"predict_step": lambda self, batch: self(batch[0])}))
    with pytest.raises(ZeroDivisionError):
        train(module, begins_with(3), LambdaCallback(on_train_batch_end=lambda *_: 1 / 0))

    (predicted,) = {len(part) for part in trainer(begins_with()).predict(module, data())}
    assert predicted == 4 and len(module.blocks) == 3, "a prediction needs no whole network"
    with pytest.raises(ValueError, match="'blocks' has 3 of the 6 blocks that its class has built"):
        train(module, begins_with())


# What a batch costs.


def word_logits(module: gpt.LitGPT, seeds: Any) -> tuple[Tensor, Tensor]:
    x = torch.cat([gpt.sentences(seed) for seed in seeds])
    return module.net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an auxiliary loss": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1) + 0.1 * F.cross_entropy(y / 2, t),
    "a penalty": lambda y, t: F.cross_entropy(y, t) + 1e-4 * F.mse_loss(y, torch.zeros_like(y)),
    "one-hot labels": lambda y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, gpt.WORDS).float()),
    "two chunks": lambda y, t: F.cross_entropy(y[:40], t[:40]) + F.cross_entropy(y[40:], t[40:]),
    "an ignored label": lambda y, t: F.cross_entropy(y, torch.cat([t[:-3], t.new_full((3,), -100)])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_label_is_a_target_once(name: str) -> None:
    kind = type("Lit", (gpt.LitGPT,), {"loss": lambda self, seeds: LOSSES[name](*word_logits(self, seeds))})

    gpt.train(kind(), stack := Stack("net.blocks", start=2))

    assert stack.cost is not None and stack.cost.targets == 16 * gpt.LENGTH - 3 * (name == "an ignored label")


class Dense(gpt.LitGPT):
    """Each block reads those before it, so that the FLOPs are no linear function of the depth."""

    def loss(self, seeds: Any) -> Tensor:
        x = torch.cat([gpt.sentences(seed) for seed in seeds])
        features = [self.net.tokens(x[:, :-1])]
        for block in self.net.blocks:
            features.append(sum(map(block, features)))
        return F.cross_entropy(self.net.head(features[-1]).flatten(0, 1), x[:, 1:].flatten())


def test_flops_are_right_at_the_first_and_at_the_full_depth() -> None:
    gpt.train(Dense(), stack := Stack("net.blocks", start=1))
    assert stack.cost is not None
    for depth in (1, 4):
        with FlopCounter() as counter:
            Dense(depth).loss([0, 1]).backward()
        assert stack.cost.flops({"net.blocks": depth}) == counter.total


def toggled(module: Any, optimizer: Any, loss: Tensor) -> None:
    with optimizer.toggle_model(sync_grad=True):
        module.manual_backward(loss)


BY_HAND: dict[str, Callable[[Any, Any, Tensor], object]] = {
    "twice": lambda module, _, loss: (module.manual_backward(loss, retain_graph=True), module.manual_backward(loss)),
    "toggled": toggled,
    "a rate": lambda module, _, loss: module.manual_backward(loss * module.lr_schedulers().get_last_lr()[0]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_usual_lines_of_manual_optimization_are_counted(name: str) -> None:
    class Manual(gpt.LitGPT):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            BY_HAND[name](self, optimizer, self.loss([2 * batch_idx, 2 * batch_idx + 1]))
            optimizer.step()

    gpt.train(Manual(manual=True), stack := Stack("net.blocks", start=2))

    assert stack.cost is not None and stack.cost.targets == 16 * gpt.LENGTH


def test_the_targets_left_of_a_stream_fall_from_batch_to_batch() -> None:
    left: list[Any] = []

    def plan(progress: Progress) -> int:
        left.append(progress.targets_left)
        return progress.depth

    stream = type("Five", (IterableDataset,), {"__iter__": lambda self: iter(torch.arange(5).unsqueeze(1))})
    kind = type("Lit", (gpt.LitGPT,), {"train_dataloader": lambda self: DataLoader(stream(), None)})
    gpt.train(kind(), Stack("net.blocks", start=1, plan=plan))

    assert left == [16 * gpt.LENGTH * batches for batches in (5, 4, 3, 2, 1)]
