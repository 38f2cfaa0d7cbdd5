"""Grown hosts that leave the program: a folder with the weights, what host it is, and real samples with its outputs.

A folder holds `network.safetensors`, which `growth.load` reads into a host as it was before growth; `host.json`, which
tells how that host is made; and `samples.safetensors`, on which an export is checked.
"""

import csv
import json
from collections.abc import Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from esper_lightning.controllers.learned import Controller
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.spaces.action_discovery import pad_slots
from esper_lightning.evaluation.play import Outcome, play_episode
from esper_lightning.growth.export import SUFFIXES, TOLERANCE, Format, check_format, export, fold, load, save
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.runtime.ranks import Ranks
from esper_lightning.runtime.registry import describe_factory, import_object
from esper_lightning.runtime.serialization import replace_durably
from esper_lightning.tasks import Split
from esper_lightning.telemetry.events import EVENTS_FILE, EventLog
from esper_lightning.telemetry.observer import Observer, join, observe, started

NETWORK_FILE, HOST_FILE, SAMPLES_FILE = ("network.safetensors", "host.json", "samples.safetensors")

FORMAT_VERSION = 1
"""Version of host.json; folders of another version are refused."""

NUM_SAMPLES = 8
"""Test samples that are saved beside a network."""

PROGRAM_FILE, FOLDED_FOLDER, STEPS_FILE = "network.pt2", "folded", "scores.csv"
"""Files of a host that `grow` has grown, beside those of every saved host."""

PREDICTED_SAMPLES = 256
"""Test samples in one forward pass."""


def describe_host(pool: HostPool, host: int, outcome: Outcome) -> dict[str, Any]:
    """Return how a host is made and its results at the end of an episode, in plain JSON types."""
    env, factory = pool.envs[host], pool.env_factory
    return {
        "format": FORMAT_VERSION,
        "host": describe_factory(factory.host, env.context.context.architecture),
        "input_shape": list(factory.data.input_shape),
        "outputs": factory.data.outputs,
        "slots": None if factory.shared_space is None else list(factory.shared_space.slots),
        "controller": outcome.controller,
        "rng_seed": env.rng_seed,
        "context": outcome.contexts[host],
        "test_score": float(outcome.score[host]),
        "objective": float(outcome.objective[host]),
        "parameters": int(outcome.parameters[host]),
        "seeds": [seed._asdict() for seed in outcome.topologies[host]],
    }


def fossilized_copy(env: HostEnv) -> nn.Module:
    """Return a copy of a host's network with its fossilized seeds only, in evaluation mode, on the CPU."""
    network = deepcopy(env.network).cpu().eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return network


def test_data_of(pool: HostPool, env: HostEnv) -> Split:
    """Return the test split as the host sees it, on the CPU."""
    return pool.data.test.to(env.device).variant(env.context.variant_index).to(torch.device("cpu")).batch()


def save_host(folder: Path, network: nn.Module, description: Mapping[str, Any], inputs: Tensor) -> None:
    """Write a grown network into a folder, with a few real inputs; files of an earlier one are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        samples = {"inputs": inputs.contiguous(), "outputs": network(inputs).contiguous()}
    save(network, folder / NETWORK_FILE)
    replace_durably(folder / SAMPLES_FILE, lambda file: file.write(safetensors.torch.save(samples)))
    text = json.dumps(description, indent=1) + "\n"
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
    """Return the tensors `inputs` and `outputs` in a file of samples. Raises ValueError if it is damaged."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    if not {"inputs", "outputs"} <= tensors.keys():
        raise ValueError(f"{path} holds {sorted(tensors)!s:.100}, and not inputs and outputs")
    return tensors


def grow_host(pool: HostPool, name: str, controller: Controller, *, rng_seed: int, folder: Path) -> None:
    """Train the host of a pool of one while a controller grows it, and write what it has become.

    The folder gets the grown network, its `torch.export` program, the network with its seeds folded into its layers,
    test scores after each step, and the events of the seeds' lives, from which `report` makes a page.
    """
    pool.reset([rng_seed])
    before, epochs, ranks = fossilized_copy(pool.envs[0]), count(1), Ranks((1,))
    observer = Observer(pool.space.slot, pool.space.blueprint, horizon=pool.horizon, n_envs=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVENTS_FILE).unlink(missing_ok=True)
    log = EventLog(folder / EVENTS_FILE)
    log.write([started(pool, tick=0, hosts=1)])

    def report(step: StepResult) -> None:
        events, epoch = "".join(f"; {event}" for event in step.events), next(epochs)
        log.write(observer.update(join([observe(pool, step, epoch)], ranks)))
        print_status(
            f"epoch {epoch} of {pool.config.horizon}: validation score {step.metrics.score[0]:.4f}, "
            f"{step.metrics.parameters[0]} parameters{events}"
        )

    outcome = play_episode(pool, name, controller, rng_seeds=[rng_seed], on_step=report)
    log.close()
    network, description = fossilized_copy(pool.envs[0]), describe_host(pool, 0, outcome)
    inputs, targets = test_data_of(pool, pool.envs[0])
    samples = inputs[:NUM_SAMPLES]

    @torch.no_grad()
    def predict(network: nn.Module) -> torch.Tensor:
        return torch.cat([next(iter_tensors(network(part))) for part in inputs.split(PREDICTED_SAMPLES)])

    expected, rows = predict(network), []

    def measure(step: str, network: nn.Module) -> None:
        outputs, parameters = predict(network), count_parameters(network)
        measures = pool.task.measure(outputs, targets)
        score, loss = (part.double().mean().item() for part in (measures.score, measures.loss))
        rows.append([step, score, loss, parameters, (outputs.double() - expected.double()).abs().max().item()])
        print_status(f"{step}: test score {score:.4f}, {parameters} parameters")

    measure("before training", before)
    measure("grown", network)
    save_host(folder, network, description, samples)
    measure(f"loaded from {NETWORK_FILE}", load_host(folder, description))
    export(network, samples, folder / PROGRAM_FILE, "pt2")
    measure(f"program {PROGRAM_FILE}", torch.export.load(folder / PROGRAM_FILE).module())
    folded = deepcopy(network)
    for fate in fold(folded, samples):
        told = f"folded into {fate.target_layer}" if fate.target_layer else f"not folded: {fate.reason}"
        print_status(f"{fate.slot}: {told}")
    save_host(folder / FOLDED_FOLDER, folded, description, samples)
    measure("folded", folded)
    with (folder / STEPS_FILE).open("w", newline="") as file:
        # The last column is the largest difference of an output from those of the grown network.
        header = ["step", "test_score", "test_loss", "parameters", "max_difference"]
        csv.writer(file).writerows([header, *rows])


def export_grown(source: str, to: Format, *, out: str | None = None) -> None:
    """Write a grown network as a file that other programs run, and check it on real inputs.

    Args:
        source: Folder that `grow` has written. The class of the host that it names is imported and called: name only
            folders that you trust.
        to: pt2: a program of torch.export, which runs without this package. onnx: a model of ONNX; needs the extra
            [onnx].
        out: File to write. None: `network` in the folder, with a suffix.
    """
    check_format(to)
    folder = Path(source)
    network = load_host(folder, read_description(folder))
    samples = read_samples(folder / SAMPLES_FILE)
    with torch.no_grad():
        outputs = network(samples["inputs"])
    if not torch.allclose(outputs, samples["outputs"], rtol=TOLERANCE, atol=TOLERANCE):
        raise ValueError(f"{folder}: the network gives other outputs than when it was saved; save it again")
    target = folder / f"network{SUFFIXES[to]}" if out is None else Path(out)
    difference = export(network, samples["inputs"], target, to)
    print_status(f"written to {target}: on {NUM_SAMPLES} inputs its outputs differ by at most {difference:.2g}")
