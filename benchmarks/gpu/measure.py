"""Measurements of the check on a GPU: `python -m benchmarks.gpu.measure NAME …` prints results of one of them."""

import csv
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning import Callback, Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.depth import LitNet, make_gpt
from benchmarks.execution import DEVICE, raw_seconds, seconds, step
from benchmarks.gpu.report import print_result
from benchmarks.hosts import BATCH, BATCHES, CASES, ExecutorChoice, Noise, RawLoop, make_pool, tiny
from esper_lightning.callbacks import Stack
from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.actions import Op, to_action
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import PRECISIONS, HostTraining
from esper_lightning.envs.measurements import download
from esper_lightning.growth.depth import depths
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import GPT, Attached
from esper_lightning.runtime.machine import resident_memory
from esper_lightning.tasks import Digits

ACCELERATOR = "gpu" if DEVICE.type == "cuda" else "cpu"
"""Lightning's name of the device."""

FORMATTED = {"cpu": ("shufflenet_v2_x0_5", "stage3"), "cuda": ("resnet18", "layer3")}
"""Network of torchvision that is trained in all formats, and the place of its slot, by type of device."""

MATRIX_SIDE = {"cpu": 256, "cuda": 8192}
"""Side of the square matrices whose product is timed, by type of device."""

ROLLOUTS, SETTLED = 50, 5
"""Rollouts over which memory is compared, and the rollout by which allocators and caches are filled."""

TICKS, OVERFLOWING = 4, 2.0**12
"""Ticks of a training in one precision, and factor of the initial loss scale with which gradients overflow fp16."""

ROUNDS = 3
"""Rounds of a measurement of speed, of which the fastest counts."""


def executors() -> list[str]:
    """Return the executors that are measured on this device."""
    return ["streams", "fused"] if DEVICE.type == "cuda" else ["loop", "fused"]


def measured_pool(executor: str, hosts: int, *, case: str = "digits", precision: str = "fp32") -> HostPool:
    """Return a pool whose hosts have seeds of all kinds."""
    data = CASES[case].task.load().copy_to([DEVICE])
    return make_pool(CASES[case], data, hosts, ExecutorChoice(executor, True), "different", precision)


def growing_pool(executor: str, precision: str = "fp32") -> HostPool:
    """Return a pool of four digits hosts in which a controller can grow seeds quickly."""
    config = EnvConfig(
        executor=executor,
        training=HostTraining(lr=0.005, batches=8, max_grad_norm=None, onednn=False, precision=precision),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        actions=ActionConfig(tempos={"FAST": 2}),
    )
    task = Digits()
    data = task.load().copy_to([DEVICE])
    return HostPool(task, data, tiny, config=config, n_envs=4, device=DEVICE, governor=GovernorConfig())


@contextmanager
def no_waits() -> Iterator[list[int]]:
    """Raise an error at every wait for the GPU but the downloads of a tick, whose number is in the list."""
    downloads = [0]

    def read(tensor: Tensor) -> Tensor:
        downloads[0] += 1
        torch.cuda.set_sync_debug_mode("default")
        numbers = download(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return numbers

    with patch("esper_lightning.envs.host_pool.download", read):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield downloads
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits(executor: str) -> None:
    """Check that a tick waits for the GPU only twice, in every precision."""
    for precision in ("fp32", "bf16", "fp16"):
        pool = measured_pool(executor, 8, precision=precision)
        action = to_action([(Op.WAIT,)] * pool.n_envs, pool.device)
        pool.step(action)  # creates what is cached
        if DEVICE.type != "cuda":
            pool.step(action)
            continue
        with no_waits() as downloads:
            pool.step(action)
        print_result(f"downloads of a tick in {precision}", downloads[0])
        assert downloads[0] == 2, "a tick downloads its actions and its measurements"


def precisions(executor: str) -> None:
    """Train hosts in every precision; with fp16 gradients overflow at first, and the loss scale must come down."""
    for precision in (name for name in PRECISIONS if name != "tf32" or DEVICE.type == "cuda"):
        pool, controller = growing_pool(executor, precision), RandomValid(0)
        pool.reset(range(4))
        for scale in (env.loss_scale for env in pool.envs if precision == "fp16"):
            scale.set(scale.scale * OVERFLOWING, scale.good_steps)
        first, *_, last = (pool.step(controller.act(pool)).metrics.loss.mean().item() for _ in range(TICKS))
        skipped = min(env.skipped_steps for env in pool.envs)
        print_result(f"loss after tick 1 and {TICKS} in {precision}", f"{first:.3f}, {last:.3f}")
        print_result(f"fewest skipped steps of a host in {precision}", skipped)
        assert last < first and (skipped > 0) == (precision == "fp16"), "hosts learn; steps that overflow are skipped"


def launches() -> None:
    """Count the kernels that a tick launches."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    for executor in executors():
        pool = measured_pool(executor, 64 if DEVICE.type == "cuda" else 2)
        step(pool)
        with profile(activities=kinds) as record:
            step(pool)
        counts = {event.key: event.count for event in record.key_averages()}
        launched = sum(n for key, n in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
        copied = sum(n for key, n in counts.items() if key.startswith("cudaMemcpy"))
        print_result(f"{executor}, {pool.n_envs} hosts: kernels launched in a tick", launched)
        print_result(f"{executor}, {pool.n_envs} hosts: copies in a tick", copied)


def memory(executor: str, rollouts: int = ROLLOUTS) -> None:
    """Compare the memory after 50 rollouts with that after five, with seeds that are grown and culled at random."""
    pool = growing_pool(executor)
    controller, settled = RandomValid(0), {}
    for rollout in range(1, rollouts + 1):
        pool.reset(range(4))  # the same rollout, so that memory must be the same
        for _ in range(pool.config.horizon):
            pool.step(controller.act(pool))
        if rollout in (SETTLED, rollouts):
            now = {"process": resident_memory()}
            if DEVICE.type == "cuda":
                now["tensors on the GPU"] = torch.cuda.memory_allocated() / 2**20
            settled = settled or now
    for kind, mib in now.items():
        print_result(f"{kind} after {rollouts} rollouts", f"{mib:.1f}", "MiB")
        print_result(f"{kind}: growth since rollout {SETTLED}", f"{mib - settled[kind]:+.2f}", "MiB")


def comparison(path: Path) -> list[dict[str, str]]:
    """Return the rows of a comparison without the time that they took."""
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "pool_seconds"} for row in csv.DictReader(file)]


def resume(accelerator: str, folder: str) -> None:
    """Kill a deterministic run, resume it, and compare its end with that of a run that was not killed."""
    root = Path(folder)
    flags = ["--trainer.deterministic", "true", "--trainer.max_epochs", "4", "--trainer.enable_progress_bar", "false"]
    flags += ["--trainer.accelerator", accelerator, "--trainer.devices", "1", "--config", "configs/smoke.yaml"]
    command = [sys.executable, "-m", "esper_lightning", "fit", *flags, "--trainer.default_root_dir"]
    subprocess.run([*command, str(root / "whole")], check=True)
    with subprocess.Popen([*command, str(root / "killed")]) as run:
        while run.poll() is None and not list((root / "killed").rglob("last.ckpt")):
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    print_result("the run was killed", run.returncode == -signal.SIGKILL)
    (checkpoint,) = (root / "killed").rglob("last.ckpt")
    subprocess.run([*command, str(root / "killed"), "--ckpt_path", str(checkpoint)], check=True)
    ends = [comparison(sorted((root / name).rglob("evaluation.csv"))[-1]) for name in ("whole", "killed")]
    print_result("the resumed run ends with the same comparison", ends[0] == ends[1])
    print_result("largest first_ratio_error", f"{max(first_ratio_errors(root / 'whole')):.2g}")
    assert ends[0] == ends[1], "a resumed run continues bit for bit"


def first_ratio_errors(folder: Path) -> list[float]:
    """Return the difference of the probability ratio from 1 at the beginning of each update of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {file.parent for file in folder.rglob("events.out.*")}
    points = EventAccumulator(str(events)).Reload().Scalars("train/first_ratio_error")
    return [point.value for point in points]


def matrix_rate() -> None:
    """Measure the rate of matrix products, with which speeds can be compared."""
    side = MATRIX_SIDE[DEVICE.type]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
        fastest = min(seconds(lambda a=a, b=b: a @ b) for _ in range(10))
        print_result(f"product of {side}² numbers in {name}", f"{2 * side**3 / fastest / 1e12:.2f}", "TFLOP/s")


def speed(case: str, hosts: str, precisions: tuple[str, ...] = ("fp32", "bf16")) -> None:
    """Measure how fast hosts train without seeds and with different ones, relative to a plain loop."""
    data = CASES[case].task.load().copy_to([DEVICE])
    n, images = int(hosts), int(hosts) * BATCHES * BATCH
    for precision in precisions:
        raw = RawLoop(CASES[case], data, n, precision)
        raw_seconds(raw)
        plain = min(min(raw_seconds(raw).values()) for _ in range(ROUNDS))
        print_result(f"{precision}: raw loop", f"{images / plain:.0f}", "images/s")
        print_result(f"{precision}: raw loop", f"{images / plain * raw.flops() / 1e12:.4f}", "TFLOP/s")
        for name in executors():
            for seeds in ("none", "different"):
                pool = make_pool(CASES[case], data, n, ExecutorChoice(name, True), seeds, precision)
                step(pool)
                rounds = [step(pool) for _ in range(ROUNDS)]
                trained, ticked = min(one.train for one in rounds), min(one.tick for one in rounds)
                label = f"{precision}: {name}, seeds {seeds}"
                print_result(label, f"{n / ticked:.1f}", "environment steps/s")
                print_result(label, f"{images / trained:.0f}", "images/s")
                print_result(f"{label}: training over the raw loop's", f"{plain / trained:.2f}")
                del pool


def formats() -> None:
    """Measure how fast networks train in each precision and memory format, compiled too; then run compiled hosts."""
    task, batches = Noise((3, 32, 32), 10), 1 if DEVICE.type == "cpu" else BATCHES
    network, slot = FORMATTED[DEVICE.type]
    for precision, memory, compile in product(("fp32", "bf16"), ("contiguous", "channels_last"), (False, True)):
        config = EnvConfig(training=HostTraining(batches=batches, precision=precision, compile=compile))
        host = partial(Attached, network=f"torchvision.models.{network}", slots=[slot], memory_format=memory)
        pool = HostPool(task, task.load().copy_to([DEVICE]), host, config=config, n_envs=2, device=DEVICE)
        label = f"{precision}, {memory}{', compiled' if compile else ''}"
        print_result(f"{label}: first tick", f"{step(pool).tick:.2f}", "s")
        trained = min(step(pool).train for _ in range(ROUNDS))
        print_result(f"{label}: training", f"{2 * batches * BATCH / trained:.0f}", "images/s")
    flags = ["--config", "configs/smoke.yaml", "--trainer.accelerator", ACCELERATOR, "--trainer.devices", "1"]
    flags += ["--data.env.executor", "loop", "--data.env.training.compile", "true", "--model.ppo.compile", "true"]
    subprocess.run([sys.executable, "-m", "esper_lightning", "fit", *flags], check=True)


def depth_hosts() -> None:
    """Let hosts in bf16 grow from one block to four, with each executor."""
    width, batches = (16, 1) if DEVICE.type == "cpu" else (64, BATCHES)
    for executor in executors():
        training = HostTraining(batches=batches, precision="bf16")
        actions = ActionConfig(blueprints=["stack"], tempos={"AT_ONCE": 1})
        config, task = EnvConfig(executor=executor, training=training, actions=actions), Noise((32,), 96)
        host = partial(GPT, width=width, blocks=1, heads=4, context=32, slots=[], most=4)
        pool = HostPool(task, task.load().copy_to([DEVICE]), host, config=config, n_envs=2, device=DEVICE)
        for slot in range(len(pool.space.slot)):
            pool.step(to_action([(Op.GERMINATE, slot)] * pool.n_envs, pool.device))
            label = f"{executor}: a tick with {depths(pool.envs[0].slots)[0]} blocks"
            print_result(label, f"{1000 * step(pool).tick:.0f}", "ms")
        assert {*depths(pool.envs[0].slots)} == {4} and math.isfinite(pool.envs[0].history.loss[-1]), "they train"


class Losses(Callback):
    """Keeps the losses of all training steps."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].detach())


def depth_stack(steps: int = 40) -> None:
    """Grow a GPT from two blocks to four in a training of its own, in bf16, with the callback `Stack`."""
    torch.manual_seed(0)
    text = torch.randint(256, (8, 129))
    module, kept = LitNet(make_gpt(4), steps, rate=1e-2), Losses()
    plain: dict[str, Any] = {"devices": 1, "logger": False, "enable_checkpointing": False, "max_steps": steps}
    callbacks = [Stack("net.blocks", start=2, at=0.5), kept]
    trainer = Trainer(accelerator=ACCELERATOR, precision="bf16-mixed", callbacks=callbacks, **plain)
    trainer.fit(module, DataLoader([(text[:, :-1], text[:, 1:])] * steps, batch_size=None))
    losses = torch.stack(kept.values).tolist()
    for name, at in (("first", 0), ("last before growth", steps // 2 - 1), ("first after", steps // 2), ("last", -1)):
        print_result(f"loss, {name}", f"{losses[at]:.3f}")
    assert len([*module.net.get_submodule("blocks").children()]) == 4 and losses[-1] < losses[steps // 2] < losses[0], (
        "it has grown, and learns"
    )


MEASUREMENTS: dict[str, Callable[..., None]] = {
    "waits": waits,
    "precisions": precisions,
    "launches": launches,
    "memory": memory,
    "resume": resume,
    "matrix_rate": matrix_rate,
    "speed": speed,
    "formats": formats,
    "depth_hosts": depth_hosts,
    "depth_stack": depth_stack,
}


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        print_result("device", torch.cuda.get_device_name())
    name, *arguments = sys.argv[1:]
    MEASUREMENTS[name](*arguments)


if __name__ == "__main__":
    main()
