"""Estimate of the memory that hosts need, so that settings which ask for too much are refused before it is taken."""

import torch
from torch import nn

from esper_lightning.machine import check_memory

MIN_COPIES = 2
"""Tensors of the size of a parameter that training needs at least: the parameter and its gradient."""


def check_host_memory(host: nn.Module, hosts: int, device: torch.device) -> None:
    """Raise ValueError if the parameters and gradients of `hosts` such hosts are larger than the device's memory.

    Args:
        host: One of the hosts; it may be on the meta device.
        hosts: Number of hosts.
        device: Device on which they are trained.
    """
    parameters = sum(parameter.numel() for parameter in host.parameters())
    check_memory(
        MIN_COPIES * hosts * sum(one.numel() * one.element_size() for one in host.parameters()),
        f"training {hosts} hosts of {parameters} parameters needs",
        "make data.host or the number of hosts smaller",
        device,
    )
