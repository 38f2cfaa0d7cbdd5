"""Measure what the callback Grow brings, and what it costs, in a training as a user writes it.

    python -m benchmarks.grow result --policy runs/digits/version_0/checkpoints/best.ckpt  # 15 runs, 20 minutes
    python -m benchmarks.grow table
    python -m benchmarks.grow cost                                                         # about ten minutes

result: a narrow ResNet-18 on letters, trained for 20 epochs by an ordinary LightningModule: as it is; grown by the
    default rule, by a schedule and by a policy; and with the schedule's seeds built in from the start. The policy is a
    checkpoint of `fit --config configs/digits.yaml`.
table: Markdown table of the kept results.
cost: processor time of the training part of an epoch with Grow, relative to the same training without it, with empty
    slots and with four seeds. One training has minibatches with and without the callback in the order A B B A, so that
    both have the same memory. What Grow adds does not depend on the size of a minibatch; its time is therefore also
    measured with minibatches of two images, whose short steps other work of the machine disturbs less. --seeds measures
    the arithmetic of seeds, too: two trainings that change places at every minibatch. All numbers are medians with 95 %
    intervals by a bootstrap over epochs.

Results are rows of a CSV file. Rows that it has got are not measured again.
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from threading import Semaphore
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.rows import appended_rows, read_rows
from esper_lightning.blueprints import build_seed
from esper_lightning.callbacks import Grow
from esper_lightning.controllers.schedules import Schedule, ScheduledAction, write_schedule
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import HEADS, Action, to_action
from esper_lightning.growth import GrowingNetwork, LifecycleConfig, attach_slots, slots_of
from esper_lightning.growth.blend import Ramp
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


def loader(split: Split, *, is_training: bool, batch: int = BATCH) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*split), batch if is_training else 250, shuffle=is_training, drop_last=is_training)


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
        return Grow(SLOTS, decider=str(policy), loss="val_loss", rng_seed=rng_seed)
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
    """Stopwatch of a training in a thread of its own, which pauses before every minibatch until it may go on.

    Attributes:
        epochs: Processor seconds of the minibatches of each epoch.
    """

    def __init__(self) -> None:
        self.epochs: list[list[float]] = [[]]
        self._may_go, self._has_paused = Semaphore(0), Semaphore(0)
        self._begin, self._is_over = 0.0, False

    def play(self) -> None:
        """Let the training go on until it pauses again, and wait for that. Does nothing once it is over."""
        if not self._is_over:
            self._may_go.release()
            self._has_paused.acquire()

    def wait(self) -> None:
        """Wait until this training may go on. Raises TimeoutError if the program was interrupted."""
        if not self._may_go.acquire(timeout=PATIENCE):
            raise TimeoutError("no turn has come; the program was interrupted")

    def end(self) -> None:
        """Tell that the training is over."""
        self._is_over = True
        self._has_paused.release()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx > 0:
            self._record()
        self._has_paused.release()
        self.wait()
        self._begin = time.thread_time()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record()
        self.epochs.append([])

    def _record(self) -> None:
        self.epochs[-1].append(time.thread_time() - self._begin)


PATIENCE = 600.0
"""Seconds for which a training waits for its turn."""

RESAMPLES = 2000
"""Resamples of the bootstrap of a cost."""

COST_SLOTS = ("layer1", "layer2", "layer3", "layer4")


Seeds = Literal["none", "plain modules", "probationary", "fossilized"]
"""Seeds of a network whose training is timed."""

WITH_GROW: tuple[Seeds, ...] = ("none", "probationary", "fossilized")
"""Networks whose training is timed with and without Grow."""

ARITHMETIC: dict[str, tuple[Seeds, Seeds]] = {
    "four layers as plain modules": ("none", "plain modules"),
    "the same as probationary seeds": ("plain modules", "probationary"),
    "the same as fossilized seeds": ("plain modules", "fossilized"),
}
"""Trainings without Grow that are compared, the cheaper one first."""

MINIBATCHES, SMALL_BATCH = 16, 2
"""Minibatches of an epoch whose cost is measured, and images of a small one."""


def make_network(seeds: Seeds, data: TaskData) -> nn.Module:
    """Return a network for the measurement of cost."""
    torch.manual_seed(0)
    network = ResNet18(data.classes)
    if seeds == "plain modules":
        build_in(network, list(COST_SLOTS), 0)
    elif seeds != "none":
        attach_slots(network, COST_SLOTS, data.train.inputs[:2])
        growing = GrowingNetwork(network, torch.optim.AdamW(network.parameters()), horizon=1)
        for name, slot in growing.slots.items():
            growing.germinate(name, BLUEPRINT)
            slot.start_ramp(Ramp())
            for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
                slot.move_to(stage)
            slot.alpha.fill_(1.0)
            if seeds == "fossilized":
                slot.move_to(Stage.FOSSILIZED)
    return network


class Toggle(L.Callback):
    """Stopwatch of a training with a callback in some minibatches and without it in others, in the order A B B A.

    It must be the first callback. Without the other one the optimizer has a single parameter group, as the user's has.
    The last minibatch of an epoch and its validation always have the callback.

    Attributes:
        seconds: Processor seconds of the minibatches of each epoch.
    """

    def __init__(self, other: L.Callback) -> None:
        self.other = other
        self.seconds: list[list[float]] = []

    def _switch(self, trainer: Any, place: int) -> None:
        """Prepare the minibatch at a place of the epoch; the list of callbacks must not be in use for it yet."""
        is_on = is_with_callback(trainer.current_epoch, place)
        trainer.callbacks = [self, self.other] if is_on else [self]
        trainer.strategy.optimizers = self.own_optimizers if is_on else self.plain_optimizers

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.own_optimizers, self.plain_optimizers = trainer.optimizers, pl_module.configure_optimizers()[0]
        self.seconds.append([])
        self._switch(trainer, 0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 0:
            self._record()
        self.begin = time.thread_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 < MINIBATCHES:
            self._switch(trainer, batch_idx + 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._record()

    def _record(self) -> None:
        self.seconds[-1].append(time.thread_time() - self.begin)


def is_with_callback(epoch: int, place: int) -> bool:
    """Return True if a minibatch has the callback: one of each pair, the other one in the next epoch.

    Of the last pair it is always the second, because a callback may work at the end of an epoch.
    """
    pair, member = divmod(place, 2)
    return member == 1 if pair == MINIBATCHES // 2 - 1 else (epoch + pair + member) % 2 == 0


def time_with_and_without(
    network: nn.Module, callback: L.Callback, epochs: int, *, data: TaskData, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of the minibatch with a callback and of the one without, [epochs, MINIBATCHES / 2] pairs each.

    Args:
        network: Network that is trained.
        callback: Callback that takes part in half of the minibatches.
        epochs: Measured epochs.
        data: Images.
        batch: Images of a minibatch.
    """
    toggle, total = Toggle(callback), 4 + epochs  # the first four warm up
    trained = Split(*(part[: batch * MINIBATCHES] for part in data.train))
    trainer = make_trainer(total, [toggle, callback])
    trainer.fit(
        Classifier(network, total),
        loader(trained, is_training=True, batch=batch),
        loader(Split(*(part[:16] for part in data.validation)), is_training=False),
    )
    seconds = np.array(toggle.seconds)
    is_on = np.array([[is_with_callback(epoch, place) for place in range(MINIBATCHES)] for epoch in range(total)])
    on, off = (seconds[chosen].reshape(total, -1)[4:] for chosen in (is_on, ~is_on))
    return on, off


class Cost(NamedTuple):
    """Processor time of an epoch of one training over that of another one, or time that is added to a minibatch."""

    value: float
    low: float
    high: float
    """Interval by a bootstrap over epochs."""


def cost_of_epoch(values: np.ndarray) -> Cost:  # [epochs, pairs]
    """Return the mean over the minibatches of an epoch of what a callback adds to one.

    What it does once at the beginning and once at the end of an epoch is in the first and the last pair, and counts for
    one minibatch each; the pairs between stand for all others. Medians over epochs leave disturbed minibatches out.
    Even and odd epochs are averaged, because the callback changes its place within a pair.
    """
    rng = np.random.default_rng(0)

    def estimate(parts: list[np.ndarray]) -> float:
        first, *others, last = np.mean([np.median(part, axis=0) for part in parts], axis=0)
        return float((first + last + (MINIBATCHES - 2) * np.mean(others)) / MINIBATCHES)

    parts = [values[::2], values[1::2]]
    resampled = [estimate([part[rng.integers(len(part), size=len(part))] for part in parts]) for _ in range(RESAMPLES)]
    return Cost(estimate(parts), *np.quantile(resampled, [0.025, 0.975]).tolist())


def print_costs_of_grow(epochs: int, data: TaskData) -> None:
    """Measure and print what Grow costs."""
    for seeds in WITH_GROW:
        times = []
        for batch, repeats in ((BATCH, epochs), (SMALL_BATCH, 4 * epochs)):
            grow = Grow(COST_SLOTS, decider=Wait(), lifecycle=LifecycleConfig(auto_cull=False))
            times.append(time_with_and_without(make_network(seeds, data), grow, repeats, data=data, batch=batch))
        (on, off), (small_on, small_off) = times
        step = float(np.median(off))
        print_cost(f"Grow, seeds: {seeds}", cost_of_epoch(on / off))
        added = cost_of_epoch(small_on - small_off)
        print_cost(f"the same, by steps of {SMALL_BATCH} images", Cost(*(1.0 + value / step for value in added)))
        print(f"a step of {BATCH} images: {1e3 * step:.1f} ms, of {SMALL_BATCH}: {1e3 * np.median(small_off):.1f} ms")


def print_cost(name: str, cost: Cost) -> None:
    print(f"{name:34} {cost.value:.4f} ({cost.low:.4f} … {cost.high:.4f})", flush=True)


def measure_arithmetic(pair: tuple[Seeds, Seeds], epochs: int, data: TaskData) -> Cost:
    """Return the cost of the training of the second network of a pair over that of the first one, without Grow.

    Both run in this process and change places at every minibatch, in the order A B B A; each minibatch is paired with
    the one that has the same place in the same epoch.
    """
    turns = (Turn(), Turn())
    with ThreadPoolExecutor(2) as threads:
        trained = [threads.submit(train_in_turns, *each, epochs, data) for each in zip(pair, turns, strict=True)]
        for turn in turns:
            turn.play()  # until the first minibatch
        batches = len(data.train.inputs) // BATCH
        for epoch, place in product(range(1 + epochs), range(batches)):
            for turn in turns if (epoch + place) % 2 == 0 else reversed(turns):
                turn.play()
    for training in trained:
        training.result()  # raises what the training raised
    first, second = (np.array(turn.epochs[1 : 1 + epochs]) for turn in turns)  # the first epoch warms up
    ratios, rng = second / first, np.random.default_rng(0)
    resampled = [np.median(ratios[rng.integers(epochs, size=epochs)]) for _ in range(RESAMPLES)]
    return Cost(float(np.median(ratios)), *np.quantile(resampled, [0.025, 0.975]).tolist())


def train_in_turns(seeds: Seeds, turn: Turn, epochs: int, data: TaskData) -> None:
    """Train a network for an epoch that warms up, and some that are measured."""
    turn.wait()
    try:
        trainer = make_trainer(1 + epochs, [turn])
        module = Classifier(make_network(seeds, data), 1 + epochs)
        trainer.fit(module, loader(data.train, is_training=True), loader(data.validation, is_training=False))
    finally:
        turn.end()


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
    cost.add_argument("--epochs", type=int, default=40, help="measured epochs of each kind")
    cost.add_argument("--seeds", action="store_true", help="measure the arithmetic of seeds, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "result":
        measure(args.csv, args.seeds, args.policy, args.images)
    elif args.command == "table":
        print("\n".join(table(read_rows(args.csv, Row))))
    else:
        data = Glyphs(train=BATCH * MINIBATCHES, validation=62, test=1).load()
        print_costs_of_grow(args.epochs, data)
        for name, pair in ARITHMETIC.items() if args.seeds else ():
            print_cost(name, measure_arithmetic(pair, args.epochs, data))


if __name__ == "__main__":
    main()
