"""Hosts that nobody wrote for growth: any network, with slots attached behind its modules."""

import importlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import nearest
from esper_lightning.growth.attach import attach_known, attach_slots, attachments
from esper_lightning.growth.network import slots_of

CPU = torch.device("cpu")
"""Where networks are made that are only looked at; ours may be on a device without numbers by then."""

ROWS = 2
"""Samples that a network is tried on: with one alone nobody could tell the batch's axis."""

SEEDS = 2**62
"""Of torch's own generator, which a network's constructor draws from."""


class Attached(nn.Module):
    """Any network as a host. It begins every episode with weights that its own constructor draws.

    Args:
        input_shape: Shape of one input.
        outputs: Number of classes.
        network: Import path of what makes the network, a class or a function: `torchvision.models.resnet18`.
        slots: Names of modules, as in `named_modules`, behind which seeds may grow; see `attach_slots`.
        settings: Arguments for `network`.
        classes_as: Name of the argument that takes the number of classes. None: the network knows it by itself.
        tokens: Inputs are indices of tokens, not numbers.
        isolate: See SeedSlot.
        channels_last: Those of `slots` whose features are [B, H, W, C].
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        network: str,
        slots: list[str],
        settings: dict[str, Any] | None = None,
        classes_as: str | None = "num_classes",
        tokens: bool = False,
        isolate: bool | None = None,
        channels_last: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._make = imported(network)
        self._settings = (settings or {}) | ({} if classes_as is None else {classes_as: outputs})
        wanted = (network, json.dumps(self._settings), tuple(input_shape), outputs, tokens)
        places = find_places(*wanted, tuple(slots), isolate, tuple(channels_last or ()))
        self.network = made(self._make, self._settings)
        attach_known(self, [place | {"module": f"network.{place['module']}"} for place in places])

    def initialise_whole(self, generator: torch.Generator) -> None:
        """As its constructor does: what other networks are made of nobody here knows."""
        seed = torch.randint(SEEDS, (), generator=generator, device=generator.device).item()
        with CPU, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            fresh = made(self._make, self._settings)
        for slot in slots_of(self).values():
            slot.initialise(generator)
        self.network.load_state_dict(fresh.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


@lru_cache(maxsize=32)
def find_places(
    network: str,
    settings: str,
    input_shape: tuple[int, ...],
    outputs: int,
    tokens: bool,
    slots: tuple[str, ...],
    isolate: bool | None,
    channels_last: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Where the slots of such a network are, found out by running one on numbers; whatever that draws counts for
    nothing. Raises ValueError if there are none, or if its answer does not fit the task."""
    with CPU, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        trial = made(imported(network), json.loads(settings)).eval()
        shape = (ROWS, *input_shape)
        example = torch.zeros(shape, dtype=torch.int64) if tokens else torch.randn(shape)
        try:
            with torch.no_grad():
                answer = trial(example)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise ValueError(f"host Attached: {network} does not take inputs {list(input_shape)}: {said}") from error
        attach_slots(trial, slots, example, isolate, channels_last)
    if not isinstance(answer, Tensor) or answer.shape[-1] != outputs:
        what = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ValueError(
            f"host Attached: {network} answers with {what}, the task has {outputs} classes; name the argument that "
            f"takes their number by data.host.init_args.classes_as"
        )
    return attachments(trial)


def made(make: Callable[..., nn.Module], settings: dict[str, Any]) -> nn.Module:
    """The network. Raises ValueError if it cannot be made so."""
    try:
        return make(**settings)
    except TypeError as error:
        raise ValueError(f"host Attached: {error}; see data.host.init_args.settings and classes_as") from error


def imported(path: str) -> Callable[..., nn.Module]:
    """What is called `package.module.name`. Raises ValueError if there is no such thing."""
    module, _, name = path.rpartition(".")
    try:
        home = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"host Attached: cannot import {module!r} for {path!r}: {error}") from error
    if not hasattr(home, name):
        raise ValueError(f"host Attached: {module} has no {name!r}; {nearest(name, dir(home))}")
    return getattr(home, name)
