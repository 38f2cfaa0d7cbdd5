"""A host that a controller grows, and what leaves the program: its weights, and a program of `torch.export`."""

import csv
from copy import deepcopy
from itertools import count
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import nn

from esper_lightning.controllers.learned import Controller
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.export import SUFFIXES, Format, export, load, save
from esper_lightning.growth.fold import fold
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.runtime.ranks import Ranks
from esper_lightning.telemetry.events import EVENTS_FILE, EventLog
from esper_lightning.telemetry.observer import Observer, join, observe, started

NETWORK_FILE, PROGRAM_FILE = "network.safetensors", "network.pt2"
FOLDED_FOLDER, STEPS_FILE = "folded", "scores.csv"

NUM_SAMPLES = 8
"""Test samples on which an export is checked; the program keeps them."""

PREDICTED_SAMPLES = 256
"""Test samples in one forward pass."""


def fossilized_copy(env: HostEnv) -> nn.Module:
    """Return a copy of a host's network with its fossilized seeds only, in evaluation mode, on the CPU."""
    network = deepcopy(env.network).cpu().eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return network


def grow_host(pool: HostPool, name: str, controller: Controller, *, rng_seed: int, folder: Path) -> None:
    """Train the host of a pool of one while a controller grows it, and write what it has become.

    The folder gets the grown network and its `torch.export` program, both also with seeds folded into the host's
    layers, test scores after each step, and the events of the seeds' lives, from which `report` makes a page.
    """
    pool.reset([rng_seed])
    env = pool.envs[0]
    before, epochs, ranks = fossilized_copy(env), count(1), Ranks((1,))
    observer = Observer(pool.space.slot, pool.space.blueprint, horizon=pool.horizon, n_envs=1)
    (folder / FOLDED_FOLDER).mkdir(parents=True, exist_ok=True)
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

    play_episode(pool, name, controller, rng_seeds=[rng_seed], on_step=report)
    log.close()
    network = fossilized_copy(env)
    test = pool.data.test.to(env.device).variant(env.context.variant_index).to(torch.device("cpu")).batch()
    samples = test.inputs[:NUM_SAMPLES]

    @torch.no_grad()
    def predict(network: nn.Module) -> torch.Tensor:
        return torch.cat([next(iter_tensors(network(part))) for part in test.inputs.split(PREDICTED_SAMPLES)])

    expected, rows = predict(network), []

    def measure(step: str, network: nn.Module) -> None:
        outputs, parameters = predict(network), count_parameters(network)
        measures = pool.task.measure(outputs, test.targets)
        score, loss = (part.double().mean().item() for part in (measures.score, measures.loss))
        rows.append([step, score, loss, parameters, (outputs.double() - expected.double()).abs().max().item()])
        print_status(f"{step}: test score {score:.4f}, {parameters} parameters")

    measure("before training", before)
    measure("grown", network)
    save(network, folder / NETWORK_FILE)
    load(before, folder / NETWORK_FILE)
    measure(f"loaded from {NETWORK_FILE}", before)
    export(network, samples, folder / PROGRAM_FILE, "pt2")
    measure(f"program {PROGRAM_FILE}", torch.export.load(folder / PROGRAM_FILE).module())
    for fate in fold(network, samples):
        told = f"folded into {fate.target_layer}" if fate.target_layer else f"not folded: {fate.reason}"
        print_status(f"{fate.slot}: {told}")
    save(network, folder / FOLDED_FOLDER / NETWORK_FILE)
    export(network, samples, folder / FOLDED_FOLDER / PROGRAM_FILE, "pt2")
    measure("folded", network)
    with (folder / STEPS_FILE).open("w", newline="") as file:
        # The last column is the largest difference of an output from those of the grown network.
        header = ["step", "test_score", "test_loss", "parameters", "max_difference"]
        csv.writer(file).writerows([header, *rows])


def export_grown(source: str, to: Format, *, out: str | None = None) -> None:
    """Write a grown network as a file that other programs run, and check it on real inputs.

    Args:
        source: Folder that `grow` has written. Torch reads its program: name only folders that you trust.
        to: onnx: a model of ONNX; needs the extra [onnx]. pt2: the program of torch.export that is in the folder.
        out: File to write. None: `network` in the folder, with a suffix.
    """
    path = Path(source) / PROGRAM_FILE
    if not is_zipfile(path):
        raise ValueError(f"{path} is missing or damaged; name a folder that `grow` has written")
    program = torch.export.load(path)
    (samples,), _ = program.example_inputs
    target = Path(source) / f"network{SUFFIXES[to]}" if out is None else Path(out)
    difference = export(program, samples, target, to)
    print_status(f"written to {target}: on {len(samples)} inputs its outputs differ by at most {difference:.2g}")
