"""PPO on work that is not ours, beside sb3-contrib's RecurrentPPO. Needs its libraries, which the project does not:

    pip install gymnasium stable-baselines3 sb3-contrib
    python -m benchmarks.peers [--seeds 5] [--rounds 3] [--out peers.csv]

CartPole without velocities, 8 environments: the mean return of 100 greedy episodes after runs of 50,000 and of 100,000
steps, and of the last 100 episodes of training, which explored. Steps per second of both, acting and learning, in turns
in this process; RecurrentPPO with the settings of its own test of this task. Last a cue that has to be remembered over
16 steps and repeated by two heads through masks, with memory and without.
"""

import argparse
import csv
import logging
import statistics
import sys
import time
import warnings
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning import Trainer

from benchmarks.cue import CueMemory
from callbacks import RolloutState
from esper_lightning.envs.vector import VectorEnv
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.tamiyo.controller import LearnedController
from esper_lightning.tamiyo.policy import PolicyConfig
from esper_lightning.vector_data import VectorData

try:
    from gymnasium.envs.classic_control import CartPoleEnv
    from gymnasium.spaces import Box

    from esper_lightning.envs.adapter import GymVector, gym_vector
except ImportError:
    sys.exit("this benchmark needs: pip install gymnasium stable-baselines3 sb3-contrib")

ENVS, HORIZON, LIMIT = 8, 128, 500
CHECKED = (50_000, 100_000)
GAMES = 100
SPEED_STEPS = 10_240

CARTPOLE = PPOConfig(
    lr=Anneal(start=1.5e-3, end=0.0),
    epochs=10,
    minibatches=4,
    sequence=32,
    value_coefficient=0.1,
    gamma=0.99,
    gae_lambda=0.9,
    entropy=Anneal(start=0.0, end=0.0),
    max_grad_norm=1.0,
    target_kl=None,
)

CUE = PPOConfig(
    lr=Anneal(start=2e-3, end=2e-3),
    minibatches=4,
    gamma=0.95,
    entropy=Anneal(start=3e-3, end=0.0),
    target_kl=0.05,
)


class BlindCartPole(CartPoleEnv):
    """CartPole that shows where cart and pole are, and not how they move."""

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


def trained(data: VectorData, policy: PolicyConfig, ppo: PPOConfig, steps: int, seed: int) -> TamiyoModule:
    """A policy that has met as many steps as there are in whole rollouts, and no more than `steps`."""
    torch.manual_seed(seed)
    module = TamiyoModule(policy, ppo)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=steps // (data.pool.horizon * data.n_envs),
        callbacks=[RolloutState()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


def controller(module: TamiyoModule, pool: VectorEnv, seed: int) -> LearnedController:
    """The policy without exploration, at the start of episodes that it has not met."""
    pool.reset([1_000_000 * (seed + 1) + i for i in range(pool.n_envs)])
    made = module.controller()
    made.reset(pool)
    return made


def greedy_return(module: TamiyoModule, seed: int) -> float:
    """Mean over one episode in each of 100 environments."""
    pool = cartpoles(GAMES, 1)
    decide = controller(module, pool, seed)
    returns, going = torch.zeros(GAMES), torch.ones(GAMES, dtype=torch.bool)
    while going.any():
        step = pool.step(decide.act(pool))
        returns += step.reward * going
        going &= ~(step.terminated | step.truncated)
    return returns.mean().item()


class Learned(NamedTuple):
    """How one seed did."""

    seed: int
    steps: int
    greedy: float
    exploring: float


def learn(seed: int, steps: int) -> Learned:
    """One run that is planned for `steps` steps: its learning rate falls to 0 meanwhile."""
    module = trained(VectorData(cartpoles, seed=seed), PolicyConfig(width=64), CARTPOLE, steps, seed)
    return Learned(
        seed, module.loop.ticks * ENVS, greedy_return(module, seed), module.loop.last.shown["episode_return"]
    )


def our_speed(steps: int, seed: int) -> float:
    begin = time.perf_counter()
    module = trained(VectorData(cartpoles, seed=seed), PolicyConfig(width=64), CARTPOLE, steps, seed)
    return module.loop.ticks * ENVS / (time.perf_counter() - begin)


def their_speed(steps: int, seed: int) -> float:
    """RecurrentPPO as sb3-contrib's own test sets it for this task."""
    from gymnasium.wrappers import TimeLimit
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env(lambda: TimeLimit(BlindCartPole(), LIMIT), n_envs=ENVS))
    network = {
        "net_arch": {"vf": [64], "pi": []},
        "lstm_hidden_size": 64,
        "ortho_init": False,
        "enable_critic_lstm": True,
    }
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=HORIZON,
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
    return model.num_timesteps / (time.perf_counter() - begin)


def remembered(memory: str, seed: int, rollouts: int = 300) -> float:
    """Share of 256 games that the greedy policy wins."""
    data = VectorData(lambda: CueMemory(64, 40), seed=seed)
    policy = PolicyConfig(width=64, memory=memory)
    module = trained(data, policy, CUE, rollouts * 64 * 40, seed)
    pool = CueMemory(256, 1)
    decide = controller(module, pool, seed)
    for _ in range(pool.delay + 2):
        pool.step(decide.act(pool))
    return statistics.fmean(pool.recent)


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.0f} ({min(values):.0f} … {max(values):.0f})"


def compare_speed(rounds: int) -> None:
    """In turns. Both go over every rollout ten times, in minibatches of 256 steps, and with one thread."""
    table: dict[str, list[float]] = {"ours": [], "RecurrentPPO": []}
    for seed in range(rounds):
        table["ours"].append(our_speed(SPEED_STEPS, seed))
        table["RecurrentPPO"].append(their_speed(SPEED_STEPS, seed))
        print("steps/s:", {name: round(speeds[-1]) for name, speeds in table.items()}, flush=True)
    ratios = [ours / theirs for ours, theirs in zip(*table.values(), strict=True)]
    for name, speeds in table.items():
        print(f"{name}: {spread(speeds)} steps/s")
    print(f"{min(ratios):.1f} to {max(ratios):.1f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of both programs, in turns")
    parser.add_argument("--parts", nargs="+", default=["cartpole", "speed", "cue"])
    parser.add_argument("--out", type=Path, help="a CSV of what was learned")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if "cartpole" in args.parts:
        rows = []
        for steps, seed in product(CHECKED, range(args.seeds)):
            rows.append(learn(seed, steps))
            print(rows[-1], flush=True)
        if args.out:
            with args.out.open("w", newline="") as file:
                csv.writer(file).writerows([Learned._fields, *rows])
    if "speed" in args.parts:
        compare_speed(args.rounds)
    if "cue" in args.parts:
        for memory in ("lstm", "none"):
            right = [remembered(memory, seed) for seed in range(args.seeds)]
            print(f"cue, memory {memory}: right in {', '.join(f'{share:.1%}' for share in right)}", flush=True)


if __name__ == "__main__":
    main()
