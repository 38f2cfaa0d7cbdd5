"""Memory task in plain tensors: a VectorEnv without Gymnasium.

A cue is shown once, then noise, then the agent must repeat the cue: its row by one head, its column by a second
head. Before that, only waiting is valid; at the end one wrong choice of each head is
masked, too, so that a policy without memory is right in at most one of six episodes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper_lightning.envs.vector_env import ChoiceAction, ChoiceSpace, Observation, VectorStep
from esper_lightning.runtime.machine import PhaseClock

ROWS, COLUMNS = 4, 3
WAIT_ROW, WAIT_COLUMN = ROWS, COLUMNS
CUE = ROWS + COLUMNS


class CueMemory:
    """Vector environment of N independent memory games.

    Args:
        n_envs: Number of games N.
        horizon: Environment steps in a rollout.
        delay: Steps of noise between cue and answer.
        time_limit: Steps after which an episode is truncated. None: every episode ends with an answer.
    """

    autoreset = True
    device = torch.device("cpu")

    def __init__(self, n_envs: int, horizon: int, delay: int = 16, time_limit: int | None = None) -> None:
        self.n_envs, self.horizon, self.delay, self.time_limit = n_envs, horizon, delay, time_limit
        self.space = ChoiceSpace({"row": ROWS + 1, "column": COLUMNS + 1}, masked=True)
        self.clock = PhaseClock(self.device)
        self.masks = self.space.full_masks(n_envs, self.device)
        self.observation = Observation(torch.zeros(n_envs, CUE + 1))
        self.privileged: Tensor | None = torch.zeros(n_envs, CUE)
        self.episode_starts = torch.zeros(n_envs, dtype=torch.bool)
        self.recent: list[float] = []  # 1 for each correct answer, 0 for each wrong one
        self.cue = np.zeros((n_envs, 2), dtype=np.int64)
        self.wrong = np.zeros((n_envs, 2), dtype=np.int64)  # the wrong choice of each head that is masked
        self.step_counts = np.zeros(n_envs, dtype=np.int64)
        self.reset(range(n_envs))

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        self.generators = [np.random.default_rng(seed) for seed in rng_seeds]
        self.noise = np.zeros((self.n_envs, self.delay + 2, CUE))
        for i in range(self.n_envs):
            self._begin_episode(i)
        self.episode_starts.zero_()
        self._update_observation()
        return self.observation

    def _begin_episode(self, i: int) -> None:
        random = self.generators[i]
        self.cue[i] = random.integers([ROWS, COLUMNS])
        self.wrong[i] = (self.cue[i] + random.integers(1, [ROWS, COLUMNS])) % [ROWS, COLUMNS]
        self.noise[i] = random.integers(0, 2, self.noise[i].shape)
        self.step_counts[i] = 0

    def step(self, action: ChoiceAction) -> VectorStep:
        """Apply the actions; environments whose episode ends are reset."""
        answered = self.step_counts == self.delay + 1
        right = (action.indices.numpy() == self.cue).all(1)
        self.recent += right[answered].astype(float).tolist()
        self.step_counts += 1
        cut = ~answered & (self.step_counts == self.time_limit if self.time_limit is not None else False)
        ended = None
        if cut.any():
            self.step_counts[answered] = 0  # final observations are read only of truncated episodes
            self._update_observation()
            ended = Observation(self.observation.features.clone()), self.privileged.clone()
        for i in np.flatnonzero(answered | cut):
            self._begin_episode(i)
        self._update_observation()
        self.episode_starts.copy_(torch.from_numpy(answered | cut))
        reward = torch.from_numpy((right & answered).astype(np.float32))
        score = float(np.mean(self.recent[-200:])) if self.recent else 0.0
        return VectorStep(action, reward, torch.from_numpy(answered), torch.from_numpy(cut), ended, {"right": score})

    def _update_observation(self) -> None:
        cue = torch.cat(
            [one_hot(torch.from_numpy(self.cue[:, 0]), ROWS), one_hot(torch.from_numpy(self.cue[:, 1]), COLUMNS)], 1
        ).float()
        noise = torch.from_numpy(self.noise[np.arange(self.n_envs), self.step_counts]).float()
        first = torch.from_numpy(self.step_counts == 0)[:, None]
        self.observation.features[:, :CUE] = torch.where(first, cue, noise)
        self.observation.features[:, CUE] = first[:, 0].float()
        self.privileged.copy_(cue)
        self._mask(torch.from_numpy(self.step_counts == self.delay + 1))

    def _mask(self, answering: Tensor) -> None:  # [N]
        masks = self.space.split_mask(self.masks.possible)
        row, column = masks["row"], masks["column"]
        row.copy_((torch.arange(ROWS + 1) == WAIT_ROW) ^ answering[:, None])
        row[:, :ROWS] &= torch.arange(ROWS) != torch.from_numpy(self.wrong[:, :1])
        column.copy_((torch.arange(COLUMNS + 1) == WAIT_COLUMN) ^ answering[:, None])
        column[:, :COLUMNS] &= torch.arange(COLUMNS) != torch.from_numpy(self.wrong[:, 1:])
        self.masks.forced.copy_(self.space.forced(self.masks.possible))
