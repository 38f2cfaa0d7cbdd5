"""Growth of one host by one controller, and the files that it leaves for other programs."""

import csv
from collections.abc import Mapping
from copy import deepcopy
from io import StringIO
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.checkpointing.policy_file import names_policy
from esper_lightning.console import print_status
from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.registry import CONTROLLERS, make_controller
from esper_lightning.controllers.schedule import read_schedule
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.evaluation.checkpoints import load_controller
from esper_lightning.evaluation.figures import DPI, timeline_figure
from esper_lightning.evaluation.networks import (
    NETWORK_FILE,
    fossilized_copy,
    grown_host,
    load_host,
    save_host,
    test_data_of,
)
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.export import export
from esper_lightning.growth.fold import fold
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.serialization.replace import replace_durably, replace_file

PROGRAM_FILE, FOLDED_FOLDER, STEPS_FILE, TIMELINE_FILE = "network.pt2", "folded", "accuracy.csv", "timeline.png"

PREDICTED_SAMPLES = 256
"""Test samples in one forward pass."""


class Step(NamedTuple):
    """Test results of a network after one step on its way out of the program."""

    step: str
    test_accuracy: float
    test_loss: float
    parameters: int
    max_difference: float
    """Largest difference of an output from those of the grown network."""


def find_controller(name: str, rules: Mapping[str, Controller], device: torch.device) -> Controller:
    """Return the controller with this name: a rule, a policy or its file, the file of a schedule, or one's own.

    Raises ValueError if there is none, or if the file is damaged.
    """
    if name in rules:
        return rules[name]
    if name.endswith(".json"):
        return FixedSchedule(read_schedule(Path(name)))
    if names_policy(name):
        return load_controller(name, device)
    try:
        CONTROLLERS.find(name, list(rules))
    except ValueError as error:
        raise ValueError(
            f"--controller: {error}; or name a schedule (.json), a policy (.ckpt or .safetensors), or tamiyo"
        ) from error
    return make_controller(name)


def grow_host(pool: HostPool, name: str, controller: Controller, *, rng_seed: int, folder: Path) -> list[Step]:
    """Train one host while a controller grows it, and write what it has become.

    Args:
        pool: Pool of one host.
        name: Name of the controller in the files.
        controller: Controller that grows the host.
        rng_seed: RNG seed of the host's weights, its data order and its context.
        folder: Folder for the grown network, its `torch.export` program, the network with its seeds folded into its
            layers, test accuracies after each step, and a figure of the seeds' lives.

    Returns the test results, first those of the host before it was trained.
    """
    pool.reset([rng_seed])
    before = fossilized_copy(pool.envs[0])
    epochs = count(1)
    outcome = play_episode(
        pool,
        name,
        controller,
        rng_seeds=[rng_seed],
        on_step=lambda step: _report(step, f"epoch {next(epochs)} of {pool.config.horizon}"),
    )
    grown = grown_host(pool, 0, outcome)
    inputs, targets = test_data_of(pool, pool.envs[0])
    expected = predict(grown.network, inputs)

    def measure(step: str, network: nn.Module) -> Step:
        outputs = predict(network, inputs)
        measures = pool.task.measure(outputs, targets)
        result = Step(
            step,
            measures.correct.double().mean().item(),
            measures.loss.double().mean().item(),
            count_parameters(network),
            (outputs.double() - expected.double()).abs().max().item(),
        )
        print_status(f"{step}: test accuracy {result.test_accuracy:.4f}, {result.parameters} parameters")
        return result

    steps = [measure("before training", before), measure("grown", grown.network)]
    save_host(grown, folder)
    steps.append(measure(f"loaded from {NETWORK_FILE}", load_host(folder, grown.description)))
    export(grown.network, grown.samples, folder / PROGRAM_FILE, "pt2")
    program = torch.export.load(folder / PROGRAM_FILE).module()
    steps.append(measure(f"program {PROGRAM_FILE}", program))
    folded = deepcopy(grown.network)
    for result in fold(folded, grown.samples):
        print_status(
            f"{result.slot}: "
            + (f"folded into {result.target_layer}" if result.target_layer else f"not folded: {result.reason}")
        )
    save_host(grown._replace(network=folded), folder / FOLDED_FOLDER)
    steps.append(measure("folded", folded))
    _write_steps(steps, folder / STEPS_FILE)
    figure = timeline_figure(outcome.trace, pool.space.slot, name)
    replace_file(folder / TIMELINE_FILE, lambda draft: figure.savefig(draft, dpi=DPI, format="png"))
    return steps


@torch.no_grad()
def predict(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs of a network for inputs of any number."""
    return torch.cat([next(iter_tensors(network(part))) for part in inputs.split(PREDICTED_SAMPLES)])


def _report(step: StepResult, when: str) -> None:
    """Print one line for a host epoch: accuracy, parameters, and what has happened to seeds."""
    events = "; ".join(str(event.seed_event) for event in step.events)
    print_status(
        f"{when}: validation accuracy {step.metrics.accuracy[0]:.4f}, {step.metrics.parameters[0]} parameters"
        + (f": {events}" if events else "")
    )


def _write_steps(steps: list[Step], path: Path) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Step._fields)
    writer.writerows(steps)
    replace_durably(path, lambda file: file.write(text.getvalue().encode()))
