"""Measure what the callback Grow brings, and what it costs, in a training as a user writes it.

    python -m benchmarks.grow result --policy runs/digits/version_0/checkpoints/best.ckpt  # 15 runs, 20 minutes
    python -m benchmarks.grow table
    python -m benchmarks.grow cost                                                         # about five minutes

result: a narrow ResNet-18 on letters, trained for 20 epochs by an ordinary LightningModule: as it is; grown by the
    default rule, by a schedule and by a policy; and with the schedule's seeds built in from the start. The policy is a
    checkpoint of `fit --config configs/digits.yaml`.
table: Markdown table of the kept results.
cost: processor time of the training part of an epoch with Grow, relative to the same network without it, with empty
    slots and with four seeds; and the same for the arithmetic of seeds. Trainings take turns at every minibatch; the
    numbers are medians and quartiles over epochs. The time of Grow's hooks alone, over that of the rest, hardly depends
    on what else the machine does.

Results are rows of a CSV file. Rows that it has got are not measured again.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from threading import Semaphore
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.rows import appended_rows, read_rows
from esper_lightning.blueprints import build_seed
from esper_lightning.callbacks import Grow
from esper_lightning.controllers.schedule import Schedule, ScheduledAction, write_schedule
from esper_lightning.envs import ActionConfig
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import HEADS, Action, to_action
from esper_lightning.growth import GrowingNetwork, LifecycleConfig, attach_slots, slots_of
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Glyphs, Split, TaskData

RESULTS = Path(__file__).parent / "results" / "grow.csv"

EPOCHS, BATCH, LR = 20, 64, 0.002

BASE = 8
"""Channels of the first stage; each further stage has twice as many."""

SLOTS = ("layer1", "layer2", "layer3")
"""Slots of all grown networks; a policy of `configs/digits.yaml` has three as well."""

BLUEPRINT = "conv_light"

SCHEDULED = {"layer2": 1, "layer3": 2}
"""Ticks of the germinations of the schedule. Seeds are kept as soon as they pass the gate."""

AS_IT_WAS, BUILT_IN = "as it was", "built in"

PLANS = (AS_IT_WAS, "default rule", "schedule", "policy", BUILT_IN)

POLICY_LIFECYCLE = LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0)
POLICY_ACTIONS = ActionConfig(tempos={"FAST": 2})
"""Lifecycle and actions of `configs/digits.yaml`."""


class BasicBlock(nn.Module):
    """Residual block of two 3×3 convolutions (https://arxiv.org/abs/1512.03385, page 4)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, inputs, S, S] -> [B, outputs, S / stride, S / stride]
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images of one channel, with a narrow base."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, BASE, 3, 1, 1, bias=False), nn.BatchNorm2d(BASE), nn.ReLU())
        for stage, inputs in enumerate((BASE, BASE, 2 * BASE, 4 * BASE)):
            outputs, stride = BASE * 2**stage, 1 if stage == 0 else 2
            blocks = nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
            self.add_module(f"layer{stage + 1}", blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * BASE, classes))

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, S, S] -> [B, classes]
        x = self.stem(x)
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.head(x)


class Classifier(L.LightningModule):
    """An ordinary LightningModule with a scheduler, which knows nothing of growth."""

    def __init__(self, network: nn.Module, epochs: int) -> None:
        super().__init__()
        self.network = network
        self.epochs = epochs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self.network(batch[0])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_acc", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


class Row(NamedTuple):
    """Result of a run."""

    plan: str
    rng_seed: int
    accuracy: float  # on test images, in points of 100
    parameters: int  # at the end, those of seeds included
    seconds: float  # of processor time of the training, validations included
    kept: str  # slot and blueprint of each fossilized seed
    unfinished: str  # the same of seeds that were neither kept nor removed by the end


def loader(split: Split, *, is_training: bool) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*split), BATCH if is_training else 250, shuffle=is_training, drop_last=is_training)


def make_trainer(epochs: int, callbacks: list[L.Callback]) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def make_schedule() -> Schedule:
    """Return a schedule that germinates a seed in each of two slots early, and keeps it when it passes the gate."""
    germinations = [ScheduledAction(tick, "GERMINATE", slot, blueprint=BLUEPRINT) for slot, tick in SCHEDULED.items()]
    fossilizations = [ScheduledAction(tick + 1, "FOSSILIZE", slot) for slot, tick in SCHEDULED.items()]
    return Schedule(SLOTS, (*germinations, *fossilizations))


def make_grow(plan: str, rng_seed: int, *, schedule: Path, policy: Path) -> Grow | None:
    """Return the callback of a plan, or None if nothing grows."""
    if plan == "default rule":
        return Grow(SLOTS, rng_seed=rng_seed)
    if plan == "schedule":
        return Grow(SLOTS, decider=str(schedule), rng_seed=rng_seed)
    if plan == "policy":
        return Grow(
            SLOTS,
            decider=str(policy),
            loss="val_loss",
            lifecycle=POLICY_LIFECYCLE,
            actions=POLICY_ACTIONS,
            rng_seed=rng_seed,
        )
    return None


def build_in(network: nn.Module, slots: list[str], rng_seed: int) -> list[nn.Module]:
    """Put a seed behind each of these stages as a plain module that begins as the identity, and return the seeds."""
    generator = torch.Generator().manual_seed(rng_seed)
    seeds = []
    for slot in slots:
        width = BASE * 2 ** (int(slot.removeprefix("layer")) - 1)
        seeds.append(build_seed(BLUEPRINT, "image", width, device=torch.device("cpu"), generator=generator))
        setattr(network, slot, nn.Sequential(network.get_submodule(slot), seeds[-1]))
    return seeds


def run(plan: str, rng_seed: int, data: TaskData, *, schedule: Path, policy: Path) -> Row:
    """Train and test one network."""
    L.seed_everything(rng_seed, verbose=False)
    network = ResNet18(data.classes)
    if plan == BUILT_IN:
        build_in(network, list(SCHEDULED), rng_seed)
    grow = make_grow(plan, rng_seed, schedule=schedule, policy=policy)
    trainer = make_trainer(EPOCHS, [grow] if grow else [])
    module = Classifier(network, EPOCHS)
    L.seed_everything(rng_seed, verbose=False)  # the same minibatches in all plans
    begin = time.process_time()
    trainer.fit(module, loader(data.train, is_training=True), loader(data.validation, is_training=False))
    seconds = time.process_time() - begin
    (tested,) = trainer.test(module, loader(data.test, is_training=False), verbose=False)
    occupied = {f"{name} {slot.blueprint}": slot.stage for name, slot in slots_of(network).items() if slot.occupied}
    return Row(
        plan,
        rng_seed,
        round(100.0 * tested["test_acc"], 2),
        sum(parameter.numel() for parameter in network.parameters()),
        round(seconds, 1),
        "; ".join(seed for seed, stage in occupied.items() if stage is Stage.FOSSILIZED),
        "; ".join(seed for seed, stage in occupied.items() if stage is not Stage.FOSSILIZED),
    )


def measure(path: Path, rng_seeds: list[int], policy: Path, images: int) -> None:
    """Measure all plans that the file has not got yet; each row is appended when its run ends."""
    known = {(row.plan, row.rng_seed) for row in read_rows(path, Row)}
    wanted = [(plan, seed) for seed, plan in product(rng_seeds, PLANS) if (plan, seed) not in known]
    data = Glyphs(train=images, validation=1000).load()
    with tempfile.TemporaryDirectory() as folder, appended_rows(path, Row) as append:
        schedule = Path(folder) / "schedule.json"
        write_schedule(make_schedule(), schedule)
        for plan, rng_seed in wanted:
            row = run(plan, rng_seed, data, schedule=schedule, policy=policy)
            append([row])
            print(*row, sep=", ", flush=True)


def table(rows: list[Row]) -> list[str]:
    """Return a Markdown table of means over RNG seeds, with the single runs in parentheses.

    The column "ahead" has the accuracy minus that of the network as it was, paired by RNG seed.
    """
    plain = {row.rng_seed: row for row in rows if row.plan == AS_IT_WAS}
    lines = ["| network | test accuracy | ahead | parameters | processor seconds | seeds kept | unfinished |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for plan in PLANS:
        own = [row for row in rows if row.plan == plan]
        if own:
            leads = [row.accuracy - plain[row.rng_seed].accuracy for row in own if row.rng_seed in plain]
            ahead = with_runs(leads, "{:+.2f}") if plan != AS_IT_WAS and leads else ""
            accuracy = with_runs([row.accuracy for row in own], "{:.2f}")
            parameters, seconds = mean(row.parameters for row in own), mean(row.seconds for row in own)
            kept, unfinished = (
                mean(len(seeds.split("; ")) if seeds else 0 for seeds in column)
                for column in ([row.kept for row in own], [row.unfinished for row in own])
            )
            lines.append(
                f"| {plan} | {accuracy} | {ahead} | {parameters:,.0f} | {seconds:.0f} | {kept:.1f} | {unfinished:.1f} |"
            )
    return lines


def with_runs(values: list[float], form: str) -> str:
    """Return the mean of values, and the values in parentheses."""
    return f"{form.format(mean(values))} ({', '.join(form.format(value) for value in values)})"


class Wait:
    """Decider that never grows anything."""

    def reset(self, pool: SinglePool) -> None:
        pass

    def act(self, pool: SinglePool) -> Action:
        return to_action([(0,) * len(HEADS)], pool.device)


class Turn(L.Callback):
    """Stopwatch of a training in a thread of its own, which hands over to the next training at every minibatch.

    It must be the first callback: decisions and the work after a minibatch are then measured.

    Attributes:
        own: Released when it is this training's turn.
        following: Turn of the next training.
        epochs: Processor seconds of each epoch's training.
        hook_shares: Those of the hooks of Grow in each epoch, over the rest.
    """

    def __init__(self, own: Semaphore, following: Semaphore) -> None:
        self.own, self.following = own, following
        self.epochs: list[float] = []
        self.hook_shares: list[float] = []
        self.seconds, self.hook_seconds, self.begin = 0.0, 0.0, 0.0

    def time_hooks(self, callback: L.Callback) -> None:
        """Measure the hooks of a callback."""
        for name in TIMED_HOOKS:
            setattr(callback, name, self._timed(getattr(callback, name)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            begin = time.thread_time()
            hook(*args)
            self.hook_seconds += time.thread_time() - begin

        return run

    def wait(self) -> None:
        """Wait for this training's turn. Raises TimeoutError if another training has failed."""
        if not self.own.acquire(timeout=PATIENCE):
            raise TimeoutError("no turn has come; another training has failed")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx > 0:
            self.seconds += time.thread_time() - self.begin
        self.following.release()
        self.wait()
        self.begin = time.thread_time()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append(self.seconds + time.thread_time() - self.begin)
        self.hook_shares.append(self.hook_seconds / (self.epochs[-1] - self.hook_seconds))
        self.seconds, self.hook_seconds = 0.0, 0.0


TIMED_HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
"""Hooks of Grow in a training step."""

PATIENCE = 600.0
"""Seconds for which a training waits for its turn."""

COST_SLOTS = ("layer1", "layer2", "layer3", "layer4")


class Subject(NamedTuple):
    """A network whose training is timed."""

    seeds: Literal["none", "plain modules", "probationary", "fossilized"]
    with_grow: bool = False


PLAIN = Subject("none")
PLAIN_MODULES = Subject("plain modules")
PROBATIONARY = Subject("probationary")
FOSSILIZED = Subject("fossilized")

COSTS = {
    "Grow, empty slots": (PLAIN, PLAIN._replace(with_grow=True)),
    "Grow, four probationary seeds": (PROBATIONARY, PROBATIONARY._replace(with_grow=True)),
    "Grow, four fossilized seeds": (FOSSILIZED, FOSSILIZED._replace(with_grow=True)),
    "four layers as plain modules": (PLAIN, PLAIN_MODULES),
    "the same as probationary seeds": (PLAIN_MODULES, PROBATIONARY),
    "the same as fossilized seeds": (PLAIN_MODULES, FOSSILIZED),
}
"""Trainings that are compared, the cheaper one first: costs of Grow, and of the arithmetic of seeds without it."""


def make_subject(subject: Subject, data: TaskData) -> tuple[nn.Module, list[L.Callback]]:
    """Return a network for the measurement of cost, and the callbacks of its trainer."""
    torch.manual_seed(0)
    network = ResNet18(data.classes)
    if subject.seeds == "plain modules":
        build_in(network, list(COST_SLOTS), 0)
    elif subject.seeds != "none":
        attach_slots(network, COST_SLOTS, data.train.inputs[:2])
        growing = GrowingNetwork(network, torch.optim.AdamW(network.parameters()), horizon=1)
        for name, slot in growing.slots.items():
            growing.germinate(name, BLUEPRINT)
            slot.start_ramp(DEFAULT_RAMP)
            for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
                slot.move_to(stage)
            slot.alpha.fill_(1.0)
            if subject.seeds == "fossilized":
                slot.move_to(Stage.FOSSILIZED)
    grow = Grow(COST_SLOTS, decider=Wait(), lifecycle=LifecycleConfig(auto_cull=False))
    return network, [grow] if subject.with_grow else []


def measure_cost(epochs: int, images: int) -> None:
    """Print processor times of the training part of epochs, relative to another training beside it."""
    data = Glyphs(train=images, validation=250, test=1).load()
    subjects = list(dict.fromkeys(subject for pair in COSTS.values() for subject in pair))
    turns = [Semaphore(0) for _ in subjects]
    stopwatches = [Turn(own, following) for own, following in zip(turns, turns[1:] + turns[:1], strict=True)]
    with ThreadPoolExecutor(len(subjects)) as threads:
        trained = [
            threads.submit(train_in_turns, *pair, epochs, data) for pair in zip(subjects, stopwatches, strict=True)
        ]
        turns[0].release()
    for training in trained:
        training.result()  # raises what the training raised
    seconds = dict(zip(subjects, (stopwatch.epochs[1:] for stopwatch in stopwatches), strict=True))
    rows = {
        name: [a / b for a, b in zip(seconds[grown], seconds[without], strict=True)]
        for name, (without, grown) in COSTS.items()
    }
    rows |= {
        f"hooks alone, seeds: {subject.seeds}": stopwatch.hook_shares[1:]
        for subject, stopwatch in zip(subjects, stopwatches, strict=True)
        if subject.with_grow
    }
    for name, values in rows.items():
        low, _, high = quantiles(values)
        print(f"{name:34} {median(values):.4f} ({low:.4f} … {high:.4f})", flush=True)


def train_in_turns(subject: Subject, turn: Turn, epochs: int, data: TaskData) -> None:
    """Train a network for an epoch that warms up, and some that are measured."""
    turn.wait()
    try:
        network, callbacks = make_subject(subject, data)
        for callback in callbacks:
            turn.time_hooks(callback)
        trainer = make_trainer(1 + epochs, [turn, *callbacks])
        module = Classifier(network, 1 + epochs)
        trainer.fit(module, loader(data.train, is_training=True), loader(data.validation, is_training=False))
    finally:
        turn.following.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("result")
    measured.add_argument("--csv", type=Path, default=RESULTS, help="rows are added here")
    measured.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    measured.add_argument("--policy", type=Path, default=Path("runs/digits/version_0/checkpoints/best.ckpt"))
    measured.add_argument("--images", type=int, default=4000, help="training images")
    commands.add_parser("table").add_argument("--csv", type=Path, default=RESULTS)
    cost = commands.add_parser("cost")
    cost.add_argument("--epochs", type=int, default=16)
    cost.add_argument("--images", type=int, default=2048, help="training images")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "result":
        measure(args.csv, args.seeds, args.policy, args.images)
    elif args.command == "table":
        print("\n".join(table(read_rows(args.csv, Row))))
    else:
        measure_cost(args.epochs, args.images)


if __name__ == "__main__":
    main()
