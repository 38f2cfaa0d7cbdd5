"""A compiled network computes what the uncompiled one does, whatever has grown in it."""

import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from esper_lightning.envs.snapshot import Snapshot
from esper_lightning.growth import GrowingNetwork, attach_slots, fold
from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import EAGER
from tests.growth.grown import (
    CALM,
    SIMPLE,
    Residual,
    add_noise,
    batch_of,
    generator_of,
    grow,
    host_of,
    images,
    small_network,
)

HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None


class Subject(NamedTuple):
    """Network with a slot in which a seed grows, and a batch."""

    network: nn.Module
    slot: str
    blueprint: str
    inputs: Tensor
    classes: Tensor


def built_in(layout: Any) -> Subject:
    slot = "block1" if layout == "image" else "first"
    return Subject(host_of(layout), slot, SIMPLE[layout], *batch_of(layout, samples=6))


def attached(layout: str) -> Subject:
    network, slot = small_network(), {"image": "2", "vector": "5"}[layout]
    attach_slots(network, [slot], images())
    return Subject(network, slot, SIMPLE[layout], images(6), torch.arange(6) % 2)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{f"built-in {layout}": lambda layout=layout: built_in(layout) for layout in SIMPLE},
    **{f"attached {layout}": lambda layout=layout: attached(layout) for layout in ("image", "vector")},
}


def in_a_function(network: nn.Module, **settings: Any) -> nn.Module:
    """Return a module whose forward pass is a compiled function that calls the network."""
    caller = nn.ModuleList([network])
    caller.forward = torch.compile(lambda inputs: network(inputs), **settings)
    return caller


def in_place(network: nn.Module, **settings: Any) -> nn.Module:
    network.compile(**settings)
    return network


FORMS: dict[str, Callable[..., Any]] = {"module": torch.compile, "in place": in_place, "function": in_a_function}


@pytest.fixture
def compiler() -> Iterator[None]:
    """A compiler without code of other tests, which fails where it would otherwise run a network uncompiled."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


def life(growing: GrowingNetwork, subject: Subject) -> Iterator[str]:
    """Lead a slot through everything that its forward pass depends on; yields a name of each state."""
    network, name = subject.network, subject.slot
    slot = growing.slots[name]

    def end_epoch(stage: Stage | None = None) -> None:
        """End an epoch, after which the seed is in the given stage."""
        growing.end_epoch({name: 2.0} if slot.blended else None, {name: CALM}, hold=True)
        if stage is not None:
            slot.move_to(stage)

    yield "DORMANT"
    before_growth = deepcopy(network.state_dict())
    growing.germinate(name, subject.blueprint, ticks=3)
    add_noise(slot.seed)
    yield "GERMINATED"
    end_epoch()
    yield "TRAINING"
    in_training = deepcopy(growing.state_dict())
    slot.move_to(Stage.BLENDING)
    for _ in range(3):
        yield f"BLENDING at {slot.alpha_now:.2f}"
        end_epoch()
    snapshot = Snapshot()
    snapshot.take(growing.state_dict())
    end_epoch(Stage.PROBATIONARY)
    yield "PROBATIONARY"
    growing.fossilize(name)
    yield "FOSSILIZED"
    growing.load_state_dict(snapshot.copy())
    yield "BLENDING after a rollback"
    growing.load_state_dict(in_training)
    yield "TRAINING after its state was loaded"
    network.load_state_dict(before_growth)
    growing.sync_seed_groups()
    yield "DORMANT after its state was loaded"
    growing.load_state_dict(snapshot.copy())
    growing.cull(name)
    yield "CULLED"
    while slot.stage is not Stage.DORMANT:
        end_epoch()
    growing.germinate(name, subject.blueprint, ticks=3, stage="BLENDING")
    add_noise(slot.seed, seed=1)
    end_epoch()
    yield "BLENDING of another seed"
    end_epoch()
    end_epoch(Stage.PROBATIONARY)
    growing.fossilize(name)
    fold(network, subject.inputs)
    yield "folded"


def computed(network: nn.Module, run: nn.Module, subject: Subject) -> dict[str, list[Tensor]]:
    """Return what passes of `run`, which calls `network`, compute in both modes, and with and without the seed."""
    results: dict[str, list[Tensor]] = {}
    for mode in ("evaluation", "training"):
        run.train(mode == "training")
        network.zero_grad()
        outputs = run(subject.inputs)
        F.cross_entropy(outputs, subject.classes).backward()
        results[f"outputs in {mode}"] = [outputs.detach()]
        results[f"gradients in {mode}"] = [p.new_zeros(()) if p.grad is None else p.grad for p in network.parameters()]
        results[f"buffers in {mode}"] = [buffer.clone() for buffer in network.buffers()]
    run.eval()
    with torch.no_grad():
        results["counterfactual outputs"] = [
            forward_variants(run, [frozenset(), frozenset({subject.slot})], subject.inputs)[0]
        ]
    return results


def differing(subject: Subject, form: str, backend: str, *, isolation: Any) -> list[str]:
    """Return the states of a life, and what is computed in them, in which the compiled network differs."""
    network = subject.network
    lifecycle = replace(EAGER, isolation=isolation, training_ticks=99)
    optimizer = SGD(network.parameters(), lr=0.05)
    growing = GrowingNetwork(network, optimizer, horizon=50, lifecycle=lifecycle, generator=generator_of(1))
    run = FORMS[form](network, backend=backend, fullgraph=True)
    # Inductor rounds differently.
    tolerance: dict[str, Any] = {} if backend == "inductor" else {"rtol": 0.0, "atol": 0.0}
    found = []
    for state in life(growing, subject):
        twin = deepcopy(network)
        expected, results = computed(twin, twin, subject), computed(network, run, subject)
        for name, values in expected.items():
            try:
                torch.testing.assert_close(results[name], values, **tolerance)
            except AssertionError:
                found.append(f"{state}: {name}")
    return found


slow = partial(pytest.param, marks=pytest.mark.slow)
inductor = partial(
    pytest.param, marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")]
)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("backend", "kind", "form", "isolation"),
    [
        ("eager", "built-in vector", "module", "straight_through"),
        slow("eager", "attached vector", "function", "proximal"),
        ("eager", "built-in sequence", "in place", "proximal"),
        slow("aot_eager", "attached image", "function", "straight_through"),
        ("aot_eager", "built-in vector", "module", "proximal"),
        slow("aot_eager", "built-in image", "function", "proximal"),
        inductor("inductor", "built-in vector", "module", "straight_through"),
        inductor("inductor", "attached vector", "function", "proximal"),
    ],
)
def test_a_compiled_network_computes_what_the_uncompiled_one_does_in_every_stage(
    backend: str, kind: str, form: str, isolation: str
) -> None:
    assert differing(SUBJECTS[kind](), form, backend, isolation=isolation) == []


@pytest.mark.usefixtures("compiler")
def test_a_function_that_was_compiled_and_called_before_slots_were_attached_runs_their_seeds() -> None:
    network, inputs = Residual().eval(), torch.randn(4, 5, generator=generator_of())
    call = torch.compile(lambda x: network(x), backend="eager")
    plain = call(inputs)

    grow(attach_slots(network, ["stem"], inputs)["stem"], Stage.FOSSILIZED, "mlp_small")

    assert torch.equal(call(inputs), network(inputs))
    assert not torch.equal(network(inputs), plain)
