"""Compare this project's PPO with sb3-contrib's RecurrentPPO on a standard task.

The benchmark needs libraries that the project does not need otherwise:

    pip install gymnasium stable-baselines3 sb3-contrib
    python -m benchmarks.peers [--seeds 0 1 2 3 4] [--rounds 3] [--csv benchmarks/results/peers.csv]

The task is CartPole without velocities, with 8 environments. Results are the mean return of 100 episodes of the greedy
policy (as in sb3's `evaluate_policy`) after runs of 50,000 and 100,000 steps, and the mean return of the last 100
training episodes, with exploration. Steps per second include acting and learning; both programs alternate in this
process, and RecurrentPPO has the settings of its own test of this task.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning import Callback, Trainer
from torch import Tensor

from benchmarks.rows import appended_rows
from esper_lightning.callbacks import RolloutState
from esper_lightning.datamodules import VectorData
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.ppo.policy import PolicyConfig

try:
    from gymnasium.envs.classic_control import CartPoleEnv
    from gymnasium.spaces import Box

    from esper_lightning.envs.gymnasium import GymVector, gym_vector
except ImportError:
    sys.exit("this benchmark needs: pip install gymnasium stable-baselines3 sb3-contrib")

ENVS, HORIZON, LIMIT = 8, 256, 500
THEIR_HORIZON = 128  # that of RecurrentPPO's own test: twice as many updates, each of half as many minibatches
RUN_LENGTHS = (50_000, 100_000)
"""Lengths of training runs in environment steps."""
GAMES = 100
"""Number of evaluation episodes."""
SPEED_STEPS = 10_240
"""Environment steps of a run that measures speed."""
TWO_LSTMS, ONE_LSTM = "RecurrentPPO", "RecurrentPPO, one LSTM"
EVALUATE_EVERY = 4
"""Rollouts between two evaluations for the choice of the best policy."""
SELECTION_SEED_OFFSET = 1000
"""Offset of the RNG seeds of episodes that only serve to choose the best policy of a run."""

# Chosen on RNG seeds 100 to 108. Balancing is learned quickly and forgotten as easily: with lambda 0.9, no KL target
# and a low weight of the critic's loss the cart drifts off the track in some runs, after hundreds of steps. Rollouts of
# 128 steps often contain no episode start once episodes last 500 steps, and the policy forgets how to start.
CARTPOLE = PPOConfig(
    lr=Anneal(start=1.5e-3, end=0.0),
    epochs=10,
    minibatches=8,
    sequence=32,
    value_coefficient=0.5,
    gamma=0.99,
    gae_lambda=0.95,
    entropy=Anneal(start=0.0, end=0.0),
    max_grad_norm=1.0,
    target_kl=0.015,
)


def train_policy(ppo: PPOConfig, steps: int, seed: int, *watching: Callback) -> TamiyoModule:
    """Train a policy for as many whole rollouts as fit into `steps` environment steps."""
    torch.manual_seed(seed)
    data, module = VectorData(cartpoles, seed=seed), TamiyoModule(PolicyConfig(width=64), ppo)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=steps // (data.pool.horizon * data.n_envs),
        callbacks=[RolloutState(), *watching],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


class BlindCartPole(CartPoleEnv):
    """CartPole whose observation contains positions but not velocities."""

    def __init__(self) -> None:
        super().__init__()
        whole = self.observation_space
        self.observation_space = Box(whole.low[[0, 2]], whole.high[[0, 2]])

    def reset(self, **kwargs: object) -> tuple[np.ndarray, dict]:
        seen, info = super().reset(**kwargs)
        return seen[[0, 2]], info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        seen, *rest = super().step(action)
        return seen[[0, 2]], *rest


def cartpoles(n_envs: int = ENVS, horizon: int = HORIZON) -> GymVector:
    return gym_vector(BlindCartPole, n_envs, horizon, time_limit=LIMIT)


def greedy_return(module: TamiyoModule, seed: int) -> float:
    """Return the mean return of the greedy policy over one episode in each of 100 environments."""
    pool, policy = cartpoles(GAMES, 1), module.controller()
    pool.reset([1_000_000 * (seed + 1) + i for i in range(GAMES)])  # episodes that are not used in training
    policy.reset(pool)
    returns, running = torch.zeros(GAMES), torch.ones(GAMES, dtype=torch.bool)
    while running.any():
        step = pool.step(policy.act(pool))
        returns += step.reward * running
        running &= ~(step.terminated | step.truncated)
    return returns.mean().item()


class BestSoFar(Callback):
    """Callback that ends a run with the best policy, like sb3's EvalCallback; among equals the latest.

    Policies are compared by their greedy return in episodes that are used neither for training nor for the final
    evaluation.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.best = float("-inf")
        self.weights: dict[str, Tensor] = {}
        self.steps = 0
        self.last = float("nan")  # return of the last policy in the final evaluation

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        left = trainer.max_epochs - 1 - trainer.current_epoch
        if left % EVALUATE_EVERY:
            return
        found = greedy_return(pl_module, SELECTION_SEED_OFFSET + self.seed)
        if found >= self.best:
            self.best, self.steps = found, pl_module.collector.ticks * ENVS
            self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}

    def on_fit_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.last = greedy_return(pl_module, self.seed)
        pl_module.load_state_dict(self.weights)


class Row(NamedTuple):
    """Results of one run; a run that only measures speed has no returns."""

    program: str
    steps: int
    seed: int
    steps_per_second: float | None = None
    mean_return: float | None = None
    """Mean return of the best policy of the run, as chosen by the callback."""
    kept_after: int | None = None
    """Environment steps after which this policy was reached."""
    last_return: float | None = None
    """Mean return of the policy at the end of the run."""
    exploring: float | None = None
    """Mean return of the last 100 training episodes."""


def train_and_evaluate(seed: int, steps: int) -> Row:
    """Train for `steps` steps, with a learning rate that falls to 0, and return the results."""
    best = BestSoFar(seed)
    module = train_policy(CARTPOLE, steps, seed, best)
    return Row(
        "ours",
        module.collector.ticks * ENVS,
        seed,
        mean_return=greedy_return(module, seed),
        kept_after=best.steps,
        last_return=best.last,
        exploring=module.collector.last_step.log["episode_return"],
    )


def measure_our_speed(steps: int, seed: int) -> Row:
    """Measure our speed without a KL target, so that every update takes ten epochs as RecurrentPPO's does."""
    begin = time.perf_counter()
    module = train_policy(replace(CARTPOLE, target_kl=None), steps, seed)
    met = module.collector.ticks * ENVS
    return Row("ours, ten full passes", met, seed, met / (time.perf_counter() - begin))


def measure_their_speed(steps: int, seed: int, one_lstm: bool) -> Row:
    """Measure the speed of RecurrentPPO with the settings of sb3-contrib's own test of this task.

    With `one_lstm` policy and critic share an LSTM, as ours do; in that test the critic has its own.
    """
    from gymnasium.wrappers import TimeLimit
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env(lambda: TimeLimit(BlindCartPole(), LIMIT), n_envs=ENVS))
    network = {
        "net_arch": {"vf": [64], "pi": []},
        "lstm_hidden_size": 64,
        "ortho_init": False,
        "enable_critic_lstm": not one_lstm,
        "shared_lstm": one_lstm,
    }
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=THEIR_HORIZON,
        learning_rate=7e-4,
        batch_size=256,
        n_epochs=10,
        max_grad_norm=1.0,
        gae_lambda=0.98,
        policy_kwargs=network,
        seed=seed,
        device="cpu",
    )
    begin = time.perf_counter()
    model.learn(steps)
    met = model.num_timesteps
    return Row(ONE_LSTM if one_lstm else TWO_LSTMS, met, seed, met / (time.perf_counter() - begin))


def format_range(values: list[float]) -> str:
    return f"median {statistics.median(values):.0f} ({min(values):.0f} … {max(values):.0f})"


def compare_speed(rounds: int) -> list[Row]:
    """Measure both programs in turns, each with ten epochs per update, minibatches of 256 steps, and one thread."""
    found: dict[str, list[Row]] = {}
    for seed in range(rounds):
        turn = [
            measure_our_speed(SPEED_STEPS, seed),
            *(measure_their_speed(SPEED_STEPS, seed, one) for one in (False, True)),
        ]
        print(*turn, sep="\n", flush=True)
        for row in turn:
            found.setdefault(row.program, []).append(row)
    ours, *theirs = [[row.steps_per_second for row in rows] for rows in found.values()]
    print(f"ours: {format_range(ours)} steps/s")
    for name, speeds in zip((TWO_LSTMS, ONE_LSTM), theirs, strict=True):
        ratios = [mine / other for mine, other in zip(ours, speeds, strict=True)]
        print(f"{name}: {format_range(speeds)} steps/s; ours {min(ratios):.1f} to {max(ratios):.1f} times as fast")
    return [row for rows in found.values() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--rounds", type=int, default=3, help="of both programs, in turns")
    parser.add_argument("--csv", type=Path, default=Path("peers.csv"), help="rows are added here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with appended_rows(args.csv, Row) as append:
        for steps, seed in product(RUN_LENGTHS, args.seeds):
            row = train_and_evaluate(seed, steps)
            append([row])
            print(row, flush=True)
        if args.rounds:
            append(compare_speed(args.rounds))


if __name__ == "__main__":
    main()
