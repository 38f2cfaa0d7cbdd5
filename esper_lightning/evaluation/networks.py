"""Grown hosts that leave the program: a folder with the weights, what host it is, and real samples with its outputs.

A folder holds `network.safetensors`, which `growth.load` reads into a host as it was before growth; `host.json`, which
tells how that host is made; and `samples.safetensors`, on which an export is checked.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from esper_lightning.console import print_status
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.spaces.action_discovery import pad_slots
from esper_lightning.evaluation.play import Outcome
from esper_lightning.growth.export import SUFFIXES, TOLERANCE, Format, export, load, save
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.registry import describe_factory, import_object
from esper_lightning.serialization.replace import replace_durably
from esper_lightning.tasks import Split

NETWORK_FILE, HOST_FILE, SAMPLES_FILE = NETWORK_FILES = ("network.safetensors", "host.json", "samples.safetensors")

FORMAT_VERSION = 1
"""Version of host.json; folders of another version are refused."""

NUM_SAMPLES = 8
"""Test samples that are saved beside a network."""


class GrownHost(NamedTuple):
    """A host at the end of an episode, with its fossilized seeds only."""

    network: nn.Module
    """In evaluation mode, on the CPU."""
    description: dict[str, Any]
    """How the host is made, and its results, in plain JSON types."""
    samples: Tensor
    """The first inputs of the test split, [samples, …]."""


def best_hosts(pool: HostPool, outcome: Outcome, number: int) -> list[GrownHost]:
    """Return up to `number` hosts with the best objective of an episode that has just ended, the best first."""
    best = np.argsort(-outcome.objective, kind="stable")[:number]
    return [grown_host(pool, int(host), outcome) for host in best]


def grown_host(pool: HostPool, host: int, outcome: Outcome) -> GrownHost:
    """Return a copy of one host of an episode that has just ended."""
    env, factory = pool.envs[host], pool.env_factory
    description = {
        "format": FORMAT_VERSION,
        "host": describe_factory(factory.host, env.context.context.architecture),
        "input_shape": list(factory.data.input_shape),
        "outputs": factory.data.classes,
        "slots": None if factory.shared_space is None else list(factory.shared_space.slots),
        "controller": outcome.controller,
        "rng_seed": env.rng_seed,
        "context": outcome.contexts[host],
        "test_accuracy": float(outcome.accuracy[host]),
        "objective": float(outcome.objective[host]),
        "parameters": int(outcome.parameters[host]),
        "seeds": [seed._asdict() for seed in outcome.topologies[host]],
    }
    return GrownHost(fossilized_copy(env), description, test_data_of(pool, env).inputs[:NUM_SAMPLES])


def fossilized_copy(env: HostEnv) -> nn.Module:
    """Return a copy of a host's network with its fossilized seeds only, in evaluation mode, on the CPU."""
    network = deepcopy(env.network).cpu().eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return network


def test_data_of(pool: HostPool, env: HostEnv) -> Split:
    """Return the test split as the host sees it, on the CPU."""
    return pool.data.test.to(env.device).variant(env.context.variant_index).to(torch.device("cpu"))


def save_host(grown: GrownHost, folder: Path) -> None:
    """Write a grown host into a folder; files of an earlier one are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        outputs = grown.network(grown.samples)
    samples = {"inputs": grown.samples.contiguous(), "outputs": outputs.contiguous()}
    save(grown.network, folder / NETWORK_FILE)
    replace_durably(folder / SAMPLES_FILE, lambda file: file.write(safetensors.torch.save(samples)))
    text = json.dumps(grown.description, indent=1) + "\n"
    replace_durably(folder / HOST_FILE, lambda file: file.write(text.encode()))


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's host.json. Raises ValueError if it is missing, damaged or of another version."""
    path = folder / HOST_FILE
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} holds no {HOST_FILE}; name a folder of a grown network")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path} is not of format {FORMAT_VERSION}; save the network again with this version")
    return description


def load_host(folder: Path, description: Mapping[str, Any]) -> nn.Module:
    """Return the network in a folder, in evaluation mode. Raises ValueError if the files do not belong together.

    Its class is imported and called: check the description first if the folder is from elsewhere.
    """
    try:
        host, slots = description["host"], description["slots"]
        make = import_object(host["class_path"], str(folder / HOST_FILE))
        network = make(tuple(description["input_shape"]), description["outputs"], **host["init_args"])
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"{folder / HOST_FILE}: the host cannot be made: {error!s:.300}") from error
    if slots is not None:
        if len(slots_of(network)) > len(slots):
            raise ValueError(f"{folder / HOST_FILE} is damaged: it names fewer slots than the host has")
        network = pad_slots(network, slots, torch.device("cpu"))
    load(network, folder / NETWORK_FILE)
    return network.eval()


def read_samples(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of samples; `inputs` is among them. Raises ValueError if it is damaged."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} with inputs; an export is checked on real inputs")
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    if "inputs" not in tensors:
        raise ValueError(f"{path} holds {sorted(tensors)!s:.100}, and no tensor 'inputs'")
    return tensors


def export_grown(
    source: str, to: Format, *, out: str | None = None, network: str | None = None, inputs: str | None = None
) -> None:
    """Write a grown network as a file that other programs run, and check it on real inputs.

    Args:
        source: Folder that `grow` or `test` with `save_networks` has written, or a file of `growth.save`. The class of
            the host that a folder names is imported and called: name only folders that you trust.
        to: pt2: a program of torch.export, which runs without this package. onnx: a model of ONNX; needs the extra
            [onnx]. state_dict: weights with the record of what grew, for a network with the same slots.
        out: File to write. None: `network` in the folder, or the name of the file, with a suffix.
        network: For a file: import path of a class or function that makes the network as it was before growth.
        inputs: For a file: safetensors file with real inputs of the network as the tensor `inputs`.
    """
    path = Path(source)
    if path.is_dir():
        if network is not None or inputs is not None:
            raise ValueError("--network and --inputs are for a file; a folder tells them itself, so leave them out")
        grown = load_host(path, read_description(path))
        samples = read_samples(path / SAMPLES_FILE)
        with torch.no_grad():
            outputs = grown(samples["inputs"])
        if "outputs" not in samples or not torch.allclose(outputs, samples["outputs"], rtol=TOLERANCE, atol=TOLERANCE):
            raise ValueError(f"{path}: the network gives other outputs than when it was saved; save it again")
        examples, target = samples["inputs"], path / NETWORK_FILE
    else:
        if not path.is_file():
            raise ValueError(f"there is no folder or file {source!r}; name one with a grown network")
        if network is None or inputs is None:
            raise ValueError(f"{source!r} does not tell what network it is of; give --network and --inputs")
        grown = import_object(network, "--network")()
        if not isinstance(grown, nn.Module):
            raise ValueError(f"--network {network}: it made a {type(grown).__name__}, not a network")
        load(grown, path)
        examples, target = read_samples(Path(inputs))["inputs"], path
    target = target.with_suffix(SUFFIXES[to]) if out is None else Path(out)
    difference = export(grown.eval(), examples, target, to)
    print_status(f"written to {target}: on {len(examples)} inputs its outputs differ by at most {difference:.2g}")
