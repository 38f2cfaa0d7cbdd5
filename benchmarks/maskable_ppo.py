"""Compare this project's PPO with sb3-contrib's MaskablePPO on hosts, through the Gymnasium environment.

The benchmark needs libraries that the project does not need otherwise:

    pip install gymnasium stable-baselines3 sb3-contrib
    python -m benchmarks.maskable_ppo                                        # six runs of 17,280 steps
    python -m benchmarks.maskable_ppo --steps 5760 --seeds 0 --csv short.csv
    python -m benchmarks.maskable_ppo table

Both train a policy on the same kind of hosts for the same number of environment steps (host epochs). Results are the
mean objective of the greedy policy on 64 hosts that training never used, on test images, and environment steps per
second of processor time, with acting and learning, on one thread. MaskablePPO has the settings of this project's PPO as
far as it has such settings; nothing was tuned for it. Rows that the CSV file has got are not measured again.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from lightning import Trainer

from benchmarks.cue import silence
from benchmarks.rows import appended_rows, read_rows
from esper_lightning.callbacks import RolloutState
from esper_lightning.controllers.learned import Controller
from esper_lightning.envs import HostPool
from esper_lightning.envs.seeding import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.play import play_episode
from esper_lightning.ppo.losses import PPOConfig

try:
    from esper_lightning.gym.environments import GrowthVectorEnv
    from esper_lightning.gym.make import load_config
except ImportError as error:
    sys.exit(str(error))

CONFIG = Path(__file__).parent.parent / "configs" / "digits.yaml"
RESULTS = Path(__file__).parent / "results" / "maskable_ppo.csv"

ENVS, STEPS = 48, 17_280
"""Hosts side by side, and environment steps of a run: those of `fit --config configs/digits.yaml`."""
HOSTS = 64
"""Number of hosts of an evaluation."""
OURS, THEIRS = "this project", "MaskablePPO"
ENTROPY = 0.01
"""Weight of MaskablePPO's entropy bonus, which is constant: within the range over which ours falls."""


class Row(NamedTuple):
    """Result of one training run."""

    program: str
    config: str
    steps: int
    seed: int
    objective: float
    """Mean objective of the greedy policy on hosts that training never used, on test images."""
    steps_per_second: float
    """Environment steps per second of processor time in training."""
    impossible: float
    """Share of the actions in training that were not possible."""


def count_rollouts(steps: int, horizon: int) -> int:
    """Return the number of rollouts in a run. Raises ValueError if they are not whole."""
    if steps < 1 or steps % (ENVS * horizon):
        raise ValueError(
            f"--steps must be a multiple of {ENVS * horizon}, {ENVS} hosts of {horizon} steps, got {steps}"
        )
    return steps // (ENVS * horizon)


def evaluate(controller: Controller, pool: HostPool) -> float:
    """Return the mean objective of one episode of `controller` on the evaluation hosts."""
    rng_seeds = episode_rng_seeds(0, EVALUATION, 0, n_envs=pool.n_envs)
    return float(play_episode(pool, "policy", controller, rng_seeds=rng_seeds).objective.mean())


def train_ours(config: Path, steps: int, seed: int, hosts: int) -> Row:
    """Train the policy of the config and return the results."""
    built = load_config(config, ENVS)
    data, module = built.data, built.model
    data.seed = seed
    torch.manual_seed(seed)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=count_rollouts(steps, data.horizon),
        callbacks=[RolloutState()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin = time.process_time()
    trainer.fit(module, datamodule=data)
    seconds = time.process_time() - begin
    assert module.collector.ticks * ENVS == steps
    objective = evaluate(module.controller(), data.make_pool(hosts))
    return Row(OURS, config.stem, steps, seed, objective, steps / seconds, impossible=0.0)


def train_maskable_ppo(config: Path, steps: int, seed: int, hosts: int) -> Row:
    """Train a MaskablePPO policy on the hosts of the config and return the results."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecNormalize

    from benchmarks.sb3_hosts import GreedyMaskable, HostVecEnv

    built = load_config(config, ENVS)
    pool, ppo = built.data.pool, built.model.ppo
    count_rollouts(steps, pool.horizon)
    env = HostVecEnv(GrowthVectorEnv(pool))
    normalised = VecNormalize(env, norm_reward=False, gamma=ppo.gamma)
    model = MaskablePPO("MlpPolicy", normalised, **maskable_settings(ppo, pool.horizon), seed=seed, device="cpu")
    begin = time.process_time()
    model.learn(steps)
    seconds = time.process_time() - begin
    controller = GreedyMaskable(model, normalised.normalize_obs)
    assert model.num_timesteps == steps
    objective = evaluate(controller, built.data.make_pool(hosts))
    return Row(THEIRS, config.stem, steps, seed, objective, steps / seconds, env.impossible / steps)


def maskable_settings(ppo: PPOConfig, horizon: int) -> dict[str, Any]:
    """Return the arguments of MaskablePPO that correspond to settings of this project's PPO."""
    return {
        "n_steps": horizon,
        "batch_size": ENVS * horizon // ppo.minibatches,
        "n_epochs": ppo.epochs,
        "learning_rate": lambda remaining: ppo.lr.at(1.0 - remaining),
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": ppo.clip,
        "ent_coef": ENTROPY,
        "vf_coef": ppo.value_coefficient,
        "max_grad_norm": ppo.max_grad_norm,
        "target_kl": ppo.target_kl,
    }


TRAINERS: dict[str, Callable[[Path, int, int, int], Row]] = {OURS: train_ours, THEIRS: train_maskable_ppo}


def markdown(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with a line per program and number of steps."""
    lines = ["| program | steps | objective of each run | mean | steps per second | impossible actions |"]
    lines.append("|---|---|---|---|---|---|")
    for program, steps in dict.fromkeys((row.program, row.steps) for row in rows):
        own = [row for row in rows if (row.program, row.steps) == (program, steps)]
        objectives = [row.objective for row in own]
        spread = f" ± {stdev(objectives):.3f}" if len(own) > 1 else ""
        each = ", ".join(f"{objective:.3f}" for objective in objectives)
        speeds = [row.steps_per_second for row in own]
        speed = f"{min(speeds):.0f} to {max(speeds):.0f}" if len(own) > 1 else f"{speeds[0]:.0f}"
        impossible = f"{mean(row.impossible for row in own):.1%}".replace("%", " %")
        lines.append(f"| {program} | {steps:,} | {each} | {mean(objectives):.3f}{spread} | {speed} | {impossible} |")
    return lines


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hosts", type=int, default=HOSTS, help="hosts of an evaluation")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file of results")
    options = parser.parse_args(args)
    rows = read_rows(options.csv, Row)
    if options.command == "table":
        print("\n".join(markdown(rows)))
        return
    silence()
    with appended_rows(options.csv, Row) as append:
        for seed, (program, train) in product(options.seeds, TRAINERS.items()):
            wanted = (program, options.config.stem, options.steps, seed)
            if not any(row[: len(wanted)] == wanted for row in rows):
                row = train(options.config, options.steps, seed, options.hosts)
                print(row, flush=True)
                append([row])


if __name__ == "__main__":
    main()
