"""Check that memory does not grow in a long run, with hosts whose seeds are grown and culled at random.

    make bench-memory
    python -m benchmarks.memory --executor threads --rollouts 200 --hosts 4

The benchmark prints the resident memory of the process (on CUDA also that of tensors) after every tenth rollout, and
its growth since the tenth. By then allocators and caches are filled, so further growth must stay below 1 %.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.hosts import tiny
from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.machine import resident_memory
from esper_lightning.tasks import Digits

REPORT_EVERY = 10
"""Rollouts between two measurements."""

MAX_GROWTH = 0.01
"""Largest accepted relative growth."""


def reset_peak_memory() -> None:
    """Reset the peak that `resident(peak=True)` returns."""
    Path("/proc/self/clear_refs").write_text("5")


def make_pool(executor: str, hosts: int, device: torch.device) -> HostPool:
    """Return hosts of configs/digits.yaml whose seeds can pass through all stages within an episode."""
    config = EnvConfig(
        executor=executor,
        training=HostTraining(batches=8, max_grad_norm=None, onednn=False),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        actions=ActionConfig(tempos={"FAST": 2}),
    )
    task = Digits()
    data, governor = task.load().copy_to([device]), GovernorConfig()
    return HostPool(task, data, tiny, config=config, n_envs=hosts, device=device, governor=governor)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the memory in MiB of the process and, on CUDA, of tensors."""
    gpu = {"tensors on the GPU": torch.cuda.memory_allocated() / 2**20} if device.type == "cuda" else {}
    return {"process": resident_memory()} | gpu


def play(pool: HostPool, controller: RandomValid, rollout: int) -> None:
    """Play one episode of every host, with RNG seeds that depend on the rollout."""
    pool.reset(range(rollout * pool.n_envs, (rollout + 1) * pool.n_envs))
    for _ in range(pool.config.horizon):
        pool.step(controller.act(pool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="threads", help="executor that trains the hosts")
    parser.add_argument("--rollouts", type=int, default=200, help="episodes of all hosts")
    parser.add_argument("--hosts", type=int, default=4, help="number N of hosts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool, controller = make_pool(args.executor, args.hosts, device), RandomValid(0)
    first: dict[str, float] = {}
    for rollout in range(1, args.rollouts + 1):
        play(pool, controller, rollout)
        if rollout % REPORT_EVERY == 0:
            now = memory_in_use(device)
            first = first or now
            shown = ", ".join(
                f"{kind} {mib:.1f} MiB ({mib - first[kind]:+.1f}, {mib / first[kind] - 1.0:+.2%})"
                for kind, mib in now.items()
            )
            print(f"{args.executor}, {args.hosts} hosts, rollout {rollout}: {shown}", flush=True)
    grown = max(mib / first[kind] - 1.0 for kind, mib in now.items())
    result = "within" if grown <= MAX_GROWTH else "ABOVE"
    print(f"grown by {grown:.2%} since rollout {REPORT_EVERY}: {result} the bar of {MAX_GROWTH:.0%}")


if __name__ == "__main__":
    main()
