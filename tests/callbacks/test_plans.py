"""Plans of Stack: functions that decide the depth of a network by the progress of its training."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper_lightning import from_config
from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import PolicyPlan, Progress, ScalingPlan
from esper_lightning.envs.flops import FlopCounter
from esper_lightning.evaluation.checkpoints import load_controller
from tests.callbacks.gpt import BATCHES, EPOCHS, LENGTH, WORDS, EachBatch, LitGPT, make, sentences, train, trainer
from tests.callbacks.grow.trainings import equal
from tests.decisions import WAIT, act, germinate

TOTAL = BATCHES * EPOCHS


def progress(**given: Any) -> Progress:
    parameters = {depth: 100 * depth for depth in range(1, 9)}
    defaults = {"share": 0.5, "depth": 2, "first": 2, "most": 6, "parameters": parameters, "targets_left": 1e5}
    return Progress(**{**defaults, "flops_spent": 0, "metrics": {}, **given})


class Patient:
    """A plan with a memory: another block whenever it has been asked three times since the last one."""

    reason = "it is patient"

    def __init__(self) -> None:
        self.asked = 0
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress) -> int:
        self.asked += 1
        self.seen.append(progress)
        return progress.depth + (self.asked % 3 == 0)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]


def late(progress: Progress) -> int:
    """Return four blocks once a validation has been made, and half of the training is over."""
    return 4 if progress.share >= 0.5 and "val_loss" in progress.metrics else 0


class Eager(ScalingPlan):
    """The rule of the package with less to ask for."""

    def decide(self, progress: Progress) -> int:
        return progress.deeper if self.tick >= 2 else progress.depth


class Rich(PolicyPlan):
    """The policy of the package, which is told of a thousand times as many targets."""

    def __init__(self) -> None:
        super().__init__("tamiyo_depth")

    def decide(self, progress: Progress) -> int:
        assert progress.targets_left is not None
        return super().decide(progress._replace(targets_left=1000 * progress.targets_left))


PLANS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "a rule": (Eager, [1] * 4 + [2] + [3] * 2 + [4] * 3),
    "a policy": (Rich, [1] * 4 + [2] * 6),
    "a function": (lambda: late, [1] * 5 + [4] * 5),
    "an object with a memory": (Patient, [1] * 3 + [2] * 3 + [3] * 3 + [4]),
    "an import path": (lambda: f"{__name__}.Patient", [1] * 3 + [2] * 3 + [3] * 3 + [4]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_training_resumed_with_a_plan_ends_as_the_whole_one(name: str, tmp_path: Path) -> None:
    plan, depths = PLANS[name]
    whole, seen, first = make(), EachBatch(tmp_path), Stack("net.blocks", start=1, plan=plan())
    train(whole, first, seen)
    assert seen.depths == depths

    for batches in range(1, TOTAL):
        if name == "a function" and batches == BATCHES:
            continue  # Lightning does not make up for the validation behind this batch, of which the plan would know
        module, callback = make(), Stack("net.blocks", start=1, plan=plan())
        train(module, callback, resume_from=seen.path(batches))
        assert equal(module, whole), f"resumed after {batches} batches"
        assert (callback.depths, callback.flops_spent) == (first.depths, first.flops_spent)


def test_a_plan_sees_the_training_as_it_is() -> None:
    plan = Patient()
    sizes = {depth: sum(p.numel() for p in make(depth).parameters()) for depth in (1, 2, 3, 4)}

    callback = Stack("net.blocks", start=1, plan=plan)
    train(make(), callback)

    words = 16 * LENGTH
    asked = plan.seen  # not before the first batch, when no share of the training is over
    assert [seen.share for seen in asked] == [batch / TOTAL for batch in range(1, TOTAL)][: len(asked)]
    assert [seen.targets_left for seen in asked] == pytest.approx([(TOTAL - i) * words for i in range(1, TOTAL)])
    assert all(seen.parameters == sizes and (seen.first, seen.most) == (1, 4) for seen in asked)
    assert [seen.depth for seen in asked] == [1] * 3 + [2] * 3 + [3] * 3
    assert callback.cost is not None
    assert [seen.flops_spent for seen in asked[:3]] == [i * callback.cost.flops({"net.blocks": 1}) for i in (1, 2, 3)]
    assert asked[0].metrics == {} and asked[-1].metrics.keys() >= {"val_loss"}


def test_the_rule_grows_as_long_as_the_targets_to_come_suffice() -> None:
    plan = ScalingPlan()
    assert plan(progress(share=0.2)) == 2, "too early"
    assert plan(progress(share=0.34, targets_left=15 * 400 - 1)) == 2
    assert "4 blocks would have 15 targets to come for each parameter, and the rule asks for 15" in plan.reason
    assert plan(progress(share=0.4, targets_left=1e9)) == 2, "it is asked once in each sixth of the training"
    assert plan(progress(share=0.5, targets_left=15 * 400)) == 4
    assert plan(progress(share=0.7, depth=4, most=5, targets_left=15 * 500)) == 5, "not more than there are"


def test_a_network_that_has_not_grown_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    train(module := make(), Stack("net.blocks", start=2, plan="scaling"))

    (line,) = [line for line in capsys.readouterr().out.splitlines() if " of 4 blocks, as " in line]
    assert line.startswith("Stack: net.blocks has 2 of 4 blocks, as 4 blocks would have 0.")
    assert "; build the class with 2 to load the last checkpoint; 10 training batches cost " in line
    assert LitGPT(2).load_state_dict(module.state_dict()).missing_keys == []


@pytest.mark.parametrize(
    ("settings", "plan", "depths"),
    [
        ("start: 1, at: {0.2: 2, 0.6: 4}, order: interleave", "Shares", [1, 2, 4]),
        ("start: 2, order: '0-1, 0-1'", "Shares", [2, 4]),
        ("plan: scaling", "ScalingPlan", [1]),
        ("plan: tamiyo_depth", "PolicyPlan", [1]),
        (f"plan: {__name__}.late", "function", [1, 4]),
        (f"plan: {__name__}.Patient", "Patient", [1, 2, 3, 4]),
    ],
)
def test_it_is_named_in_a_config_and_a_plan_on_the_command_line(
    settings: str, plan: str, depths: list[int], tmp_path: Path
) -> None:
    config = tmp_path / "stack.yaml"
    config.write_text(f"""
trainer:
  callbacks:
    - class_path: esper_lightning.callbacks.Stack
      init_args: {{blocks: net.blocks, {settings}}}
""")
    plain = ["fit", "--trainer.max_epochs=2", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    switches = ["--trainer.callbacks=esper_lightning.callbacks.Stack", "--trainer.callbacks.blocks=net.blocks"]
    of_file, of_line = ["--config", str(config)], [*switches, f"--trainer.callbacks.{settings.replace(': ', '=')}"]

    for args in (of_file, of_line) if settings.startswith("plan") else (of_file,):
        cli = LightningCLI(LitGPT, args=[plain[0], *args, *plain[1:]], save_config_callback=None)
        (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, Stack)]
        assert (type(callback.plan).__name__, callback.depths) == (plan, depths)
        assert len(cli.model.net.blocks) == depths[-1]


@pytest.mark.parametrize(("targets", "depths"), [(20, [1] * 6), (80, [1, 1, 2, 2, 2, 2])])
def test_the_policy_is_asked_at_sixths_and_grows_where_the_budget_is_large(targets: int, depths: list[int]) -> None:
    sizes = {1: 7_216, 2: 10_320, 3: 13_424, 4: 16_528}  # of the network of its training
    plan, depth, asked = PolicyPlan("tamiyo_depth"), 1, []
    for batch in range(1, 60):
        left = targets * sizes[1] * (1 - batch / 60)
        depth = plan(progress(share=batch / 60, depth=depth, first=1, most=4, targets_left=left, parameters=sizes))
        asked.append(depth)

    assert asked == [depth for depth in depths for _ in range(10)][1:]


def test_the_policy_sees_a_training_as_it_sees_a_host_of_its_own_training() -> None:
    budget = "--data.env.family.train=[{training.flops: [2.0e+7]}]"
    _, data = from_config("depth", "--data.n_envs=2", budget, "--data.host.init_args.width=8")
    data.build(torch.device("cpu"))
    pool, plan = data.make_pool(2, sight=load_controller("tamiyo_depth").sight), PolicyPlan("tamiyo_depth")
    pool.reset([2, 4])

    for action in (germinate(0, 0), WAIT, germinate(1, 0), germinate(2, 0)):
        for env, rows, masks in zip(pool.envs, pool.observation.features, pool.masks_on_cpu.slot, strict=True):
            block = sum(p.numel() for p in env.network.blocks[0].parameters())
            sizes = {depth: env.host_parameters + (depth - 1) * block for depth in (1, 2, 3, 4)}
            depth = len(env.network.blocks)
            left = env.targets_per_parameter(sizes[depth]) * sizes[depth]
            now = progress(share=env.tick / 6, depth=depth, first=1, most=4, targets_left=left, parameters=sizes)
            places = plan._places(now)
            torch.testing.assert_close(places.observation.features[0], rows)
            assert torch.equal(places.masks.slot[0], masks)
        pool.step(act(action, WAIT))
    assert [len(env.network.blocks) for env in pool.envs] == [4, 1]


def test_a_plan_with_a_memory_begins_anew_in_each_training_and_belongs_to_one_stack() -> None:
    stack = Stack("net.blocks", start=1, plan=Eager())
    for _ in range(2):
        train(make(), stack)
        assert stack.depths == [1, 2, 3, 4]

    plan = Patient()
    with pytest.raises(ValueError, match=r"'net.blocks' and 'net.\w+' have one plan, which remembers something"):
        train(make(), Stack("net.blocks", plan=plan), Stack("net.others", plan=plan))


def test_a_training_goes_on_with_another_plan(tmp_path: Path) -> None:
    seen = EachBatch(tmp_path)
    train(make(), Stack("net.blocks", start=1, plan=Patient), seen)
    for plan in ("scaling", "tamiyo_depth", late):
        callback = Stack("net.blocks", start=2, plan=plan)
        train(make(), callback, resume_from=seen.path(2))
        assert callback.depths[0] == 1, "the plan sees a network of fewer blocks than its own start"


def word_logits(module: LitGPT, seeds: Any) -> tuple[Tensor, Tensor]:
    x = torch.cat([sentences(seed) for seed in seeds])
    return module.net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an auxiliary loss": lambda y, t: F.cross_entropy(y, t) + 0.1 * F.cross_entropy(y / 2, t),
    "a loss that is looked at": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1) + 0 * F.cross_entropy(y, t),
    "a penalty": lambda y, t: F.cross_entropy(y, t) + 1e-4 * F.mse_loss(y, torch.zeros_like(y)),
    "one-hot labels": lambda y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, WORDS).float()),
    "two chunks": lambda y, t: F.cross_entropy(y[:40], t[:40]) + F.cross_entropy(y[40:], t[40:]),
    "an ignored label": lambda y, t: F.cross_entropy(y, torch.cat([t[:-3], t.new_full((3,), -100)])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_label_is_a_target_once(name: str) -> None:
    kind = type("Lit", (LitGPT,), {"loss": lambda self, seeds: LOSSES[name](*word_logits(self, seeds))})

    train(kind(), stack := Stack("net.blocks", start=2))

    assert stack.cost is not None and stack.cost.targets == 16 * LENGTH - 3 * (name == "an ignored label")


class Dense(LitGPT):
    """Each block reads those before it, so that the FLOPs are no linear function of the depth."""

    def loss(self, seeds: Any) -> Tensor:
        x = torch.cat([sentences(seed) for seed in seeds])
        features = [self.net.tokens(x[:, :-1])]
        for block in self.net.blocks:
            features.append(sum(map(block, features)))
        return F.cross_entropy(self.net.head(features[-1]).flatten(0, 1), x[:, 1:].flatten())


def test_flops_are_right_at_the_first_and_at_the_full_depth() -> None:
    train(Dense(), stack := Stack("net.blocks", start=1))
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
    class Manual(LitGPT):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            BY_HAND[name](self, optimizer, self.loss([2 * batch_idx, 2 * batch_idx + 1]))
            optimizer.step()

    train(Manual(manual=True), stack := Stack("net.blocks", start=2))

    assert stack.cost is not None and stack.cost.targets == 16 * LENGTH


def test_counting_does_not_draw_from_generators_of_the_data() -> None:
    class Noisy(LitGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            drawn = [data.python.random(), data.numpy.random(), float(torch.rand((), generator=data.torch))]
            self.drawn = [*getattr(self, "drawn", []), drawn]
            return super().training_step(batch, batch_idx)

    found = []
    for callbacks in ([], [Stack("net.blocks", start=2)]):
        module, data = Noisy(), LightningDataModule.from_datasets(TensorDataset(torch.arange(BATCHES)))
        data.python, data.numpy = random.Random(0), np.random.default_rng(0)
        data.torch = torch.Generator().manual_seed(0)
        trainer(*callbacks, max_steps=3, limit_val_batches=0).fit(module, datamodule=data)
        found.append(module.drawn)
    assert found[0] == found[1]


def test_the_targets_left_of_a_stream_fall_from_batch_to_batch() -> None:
    class Five(IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.arange(5).unsqueeze(1))

    stream, plan = type("Stream", (LitGPT,), {"train_dataloader": lambda self: DataLoader(Five(), None)}), Patient()
    train(stream(), Stack("net.blocks", start=1, plan=plan))

    assert [seen.targets_left for seen in plan.seen] == [16 * LENGTH * left for left in (5, 4, 3, 2, 1)]
