"""Devices on which hosts train. The policy has one device, and hosts may have several of the same type."""

from collections.abc import Sequence

import torch


def find_host_devices(
    names: Sequence[str] | None, executor: str, device: torch.device, *, alone: bool = True
) -> list[torch.device]:
    """Return the devices of hosts, which are assigned to them in turn.

    Args:
        names: Names of the devices, such as `cuda:1`. None: `device`, and with streams every other visible GPU, too.
        executor: Name of the executor that trains the hosts.
        device: Device of the policy.
        alone: One process trains. False: several do, and each has its own device.

    Raises ValueError if a name is of no device, of one that this machine lacks, of another type than that of the
    policy, or given twice, or if several processes train.
    """
    if names is None:
        return [device, *_other_gpus(device)] if executor == "streams" and alone else [device]
    if not alone:
        raise ValueError("env.devices is for one process; leave it out, and each process has its own device")
    if not names:
        raise ValueError("env.devices names no device; name at least one, or leave it out")
    devices = [_parse(name, device) for name in names]
    if len(set(devices)) < len(devices):
        raise ValueError(f"env.devices names a device twice: {', '.join(names)}; name each once")
    return devices


def _parse(name: str, device: torch.device) -> torch.device:
    try:
        parsed = torch.device(name)
    except RuntimeError:
        raise ValueError(f"env.devices: {name!r} is no device; use names such as cuda:0") from None
    if parsed.type != device.type:
        raise ValueError(f"env.devices: hosts on {name} and the policy on {device}; use trainer.accelerator to move it")
    if parsed.type != "cuda":
        return device
    if parsed.index is None or parsed.index >= torch.cuda.device_count():
        raise ValueError(f"env.devices: {name!r}, but there are the GPUs 0 to {torch.cuda.device_count() - 1}")
    return parsed


def _other_gpus(device: torch.device) -> list[torch.device]:
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus < 2:
        return []
    own_index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.device(device.type, i) for i in range(gpus) if i != own_index]
