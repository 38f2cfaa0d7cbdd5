"""RNG seeds of episodes: those of training and of evaluation never coincide."""

import numpy as np

TRAINING, EVALUATION = 0, 1
"""Purposes of an episode: the lowest bit of its RNG seed."""

MAX_RUN_RNG_SEED = 2**32 - 1
"""Largest RNG seed of a run or an evaluation: the largest that numpy's global generator takes."""


def check_rng_seed(setting: str, rng_seed: int) -> None:
    """Raise ValueError, naming the setting, unless a number can be an RNG seed."""
    if not 0 <= rng_seed <= MAX_RUN_RNG_SEED:
        kind = "not be negative" if rng_seed < 0 else f"be at most {MAX_RUN_RNG_SEED}"
        raise ValueError(f"{setting} must {kind}, got {rng_seed}")


def episode_rng_seeds(run_rng_seed: int, purpose: int, episode: int, *, n_envs: int) -> list[int]:
    """Return RNG seeds of `n_envs` episodes: even for training, odd for evaluation, so that they never coincide."""
    drawn = np.random.SeedSequence([run_rng_seed, purpose, episode]).generate_state(n_envs, np.uint64)
    return [int(rng_seed) >> 2 << 1 | purpose for rng_seed in drawn]


def draw_rng_seed(generator: np.random.Generator, purpose: int) -> int:
    """Draw the RNG seed of an episode: even for training, odd for evaluation."""
    return int(generator.integers(2**62)) << 1 | purpose
