"""RNG seeds of episodes: those of training and of evaluation never coincide."""

import numpy as np

TRAINING, EVALUATION = 0, 1
"""Purposes of an episode: the lowest bit of its RNG seed."""


def episode_rng_seeds(run_rng_seed: int, purpose: int, episode: int, *, n_envs: int) -> list[int]:
    """Return RNG seeds of `n_envs` episodes: even for training, odd for evaluation, so that they never coincide."""
    drawn = np.random.SeedSequence([run_rng_seed, purpose, episode]).generate_state(n_envs, np.uint64)
    return [int(rng_seed) >> 2 << 1 | purpose for rng_seed in drawn]
