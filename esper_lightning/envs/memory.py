"""Estimate of the memory that hosts need, so that settings which ask for too much are refused before it is taken."""

import torch
from torch import nn

from esper_lightning.machine import total_memory


def check_host_memory(host: nn.Module, hosts: int, device: torch.device) -> None:
    """Raise ValueError if parameters and gradients of `hosts` such hosts are larger than the device's memory.

    Args:
        host: One of the hosts; it may be on the meta device.
        hosts: Number of hosts.
        device: Device on which they are trained.
    """
    needed = 2 * hosts * sum(one.numel() * one.element_size() for one in host.parameters())
    if needed > total_memory(device):
        raise ValueError(
            f"training {hosts} hosts of {sum(one.numel() for one in host.parameters())} parameters needs at least "
            f"{needed / 2**30:.1f} GiB, and {device} has {total_memory(device) / 2**30:.1f} GiB; make data.host or the "
            "number of hosts smaller"
        )
