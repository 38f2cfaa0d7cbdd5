"""Loss scaling of N hosts at once, with the update rule and state of each host's own `torch.amp.GradScaler`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_lightning.envs.execution.fused.optimizer import StackedOptimizer
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.transfer import download, upload


class StackedScaler:
    """Loss scales of N hosts in the coming epoch.

    A `GradScaler` exposes its growth counter as a Python number only. It is read when an epoch begins and written when
    it ends; on CUDA both wait for the device.

    Args:
        envs: N environments whose scalers are enabled.

    Attributes:
        scales: Loss scale of each host, [N].
        good_steps: Steps of each host since its last skipped step or increase of the scale, [N].
    """

    def __init__(self, envs: Sequence[HostEnv]) -> None:
        self.envs = envs
        self.states = [env.scaler.state_dict() for env in envs]
        device = envs[0].device
        self.scales = upload([state["scale"] for state in self.states], device, torch.float32)
        self.good = upload([state["_growth_tracker"] for state in self.states], device, torch.float32)

    @torch.no_grad()
    def unscale(self, optimizer: StackedOptimizer) -> Tensor:  # [N] bool
        """Divide the gradients by the scales. Returns which hosts have finite gradients only, seeds included."""
        bad = torch.zeros_like(self.scales)
        grads = optimizer.arena.grads
        grads /= optimizer.spread(self.scales[optimizer.hosts])
        bad.index_add_(0, optimizer.hosts, optimizer.sums((~grads.isfinite()).float()))
        return bad == 0

    def update(self, healthy: Tensor) -> None:
        """Lower the scale of hosts that skipped the step, and raise it after enough steps without a skip."""
        rule = self.states[0]
        good = torch.where(healthy, self.good + 1.0, 0.0)
        due = good == rule["growth_interval"]
        higher = self.scales * rule["growth_factor"]
        raised = torch.where(due & higher.isfinite(), higher, self.scales)
        self.scales = torch.where(healthy, raised, self.scales * rule["backoff_factor"])
        self.good = torch.where(due, 0.0, good)

    def take_back(self) -> None:
        """Write the state back to the environments' scalers."""
        numbers = download(torch.stack([self.scales, self.good], 1)).tolist()
        for env, state, (scale, good) in zip(self.envs, self.states, numbers, strict=True):
            env.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(good)})
