"""Compiled hosts: same results, no recompilation for seeds or more hosts, and compiler errors are reported."""

import gc
import importlib
import logging
import pkgutil
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

import esper_lightning
from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.execution import compile as compiling
from esper_lightning.envs.execution.autotune import available_choices
from esper_lightning.envs.execution.compile import compile_parts
from esper_lightning.envs.host_training import CompileConfig, HostTraining
from esper_lightning.growth.attach import attach_slots, parts_without_slots
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT, MLP
from tests.decisions import WAIT, act, fossilize, germinate
from tests.growth.grown import CPU, add_noise, generator_of, grow, slot_named, small_cnn
from tests.runs import differences, fit, only_run
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]
Graph = torch.fx.GraphModule

SEEDS = ActionConfig(blueprints=["mlp_small", "lora"], tempos={"FAST": 2})

TRACED = CompileConfig(backend="aot_eager")
"""Backend of torch.compile that traces forward and backward, and runs the graphs without compiling them."""


ODD = CompileConfig(backend="eager", dynamic=False, fallback=True)


def training_with(compile: CompileConfig | None, **settings: Any) -> HostTraining:
    return HostTraining(batches=2, compile=compile, **settings)


class CountingCompiler:
    """Compiler that runs graphs unchanged and counts its calls."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, graph: Graph, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*inputs: Tensor) -> Any:
            self.ran += 1
            return graph(*inputs)

        return run


def names_of_parts(network: nn.Module) -> list[str]:
    names = {module: name for name, module in network.named_modules()}
    return [names[part] for part in parts_without_slots(network)]


def mlp(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return MLP(input_shape, outputs, width=12, layers=1)


def grown_episode(pool: HostPool) -> list[Tensor]:
    """Play an episode with seeds in all stages on the first host, and none on the second."""
    pool.reset([3, 4])
    seen = []
    for row in (germinate(0, 1), germinate(1, 2, tempo=1), WAIT, fossilize(0), WAIT, WAIT):
        step = pool.step(act(row, WAIT))
        seen += [step.metrics.loss, *(p.detach().clone() for env in pool.envs for p in env.network.parameters())]
    return seen


def test_parts_are_as_large_as_slots_allow() -> None:
    assert names_of_parts(GPT((8,), 12, width=16, blocks=2, heads=2)) == [
        *("tokens", "positions", "blocks.0", "blocks.1", "norm")
    ]
    assert names_of_parts(CNN((1, 8, 8), 10, blocks=2)) == ["convs.0", "convs.1", "norms.0", "norms.1", "head"]


def test_a_slot_behind_a_module_is_no_part_of_it() -> None:
    network = nn.Sequential(
        nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3)
    )
    attach_slots(network, ["0", "1.0"], torch.randn(2, 5))
    assert names_of_parts(network) == ["0", "1.0", "2"]
    plain = deepcopy(network)
    compile_parts(network, TRACED)
    for each in (plain, network):
        grow(slot_named(each, "0"), Stage.BLENDING, "lora")

    x = torch.randn(4, 5, generator=generator_of())
    torch.testing.assert_close(network(x), plain(x))
    slot_named(network, "0").empty()
    assert not torch.allclose(network(x), plain(x)), "what grows is seen"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_host_learns_as_it_always_did(make_pool: MakePool, precision: str) -> None:
    plain = make_pool(2, training=training_with(None, precision=precision))
    compiled = make_pool(2, training=training_with(TRACED, precision=precision))

    assert list(compiled.envs[0].network.state_dict()) == list(plain.envs[0].network.state_dict())
    for ours, theirs in zip(grown_episode(compiled), grown_episode(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert all("forward" in vars(part) for env in compiled.envs for part in parts_without_slots(env.network))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_so_it_does_with_a_real_compiler(make_pool: MakePool) -> None:
    plain = make_pool(1, host=mlp, actions=SEEDS, training=training_with(None))
    compiled = make_pool(1, host=mlp, actions=SEEDS, training=training_with(CompileConfig()))
    for pool in (plain, compiled):
        pool.reset([4])
        for row in (germinate(0), WAIT, WAIT):
            pool.step(act(row))

    ours, theirs = (pool.envs[0].network.state_dict().values() for pool in (compiled, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n_envs", rest_is_slow([1, 64], {1}))
@pytest.mark.slow
def test_neither_hosts_nor_seeds_compile_anything_anew(make_pool: MakePool, n_envs: int) -> None:
    count = CountingCompiler()
    pool = make_pool(n_envs, horizon=3, training=training_with(CompileConfig(backend=count)))
    number = len(parts_without_slots(pool.envs[0].network))
    assert count.compiled == 2 * number  # for training and for validation
    wanderer = RandomValid(1)
    for _ in range(pool.config.horizon):
        before = count.ran
        pool.step(wanderer.act(pool))
        assert count.ran - before == n_envs * number * (2 + 1), "everything ran compiled: two batches, one validation"
    assert any(slot.occupied for env in pool.envs for slot in env.slots)
    make_pool(2, training=pool.config.training)
    assert count.compiled == 2 * number


@pytest.mark.slow
def test_parts_that_differ_do_not_use_up_each_others_share_of_compilations() -> None:
    count = CountingCompiler()
    network = nn.ModuleList(
        nn.Linear(width, width) for width in range(2, 22)
    )  # torch stops compiling a function after 8 times
    compile_parts(network, CompileConfig(backend=count))
    for layer in network:
        layer(torch.randn(4, layer.in_features))

    assert count.compiled == count.ran == 20


def test_beyond_torchs_limit_there_is_an_error_and_not_silence() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compile_parts(layer, CompileConfig(backend=CountingCompiler(), dynamic=False))

    with pytest.raises(FailOnRecompileLimitHit):
        for samples in range(2, 12):
            layer(torch.randn(samples, 3))


@pytest.mark.slow
def test_the_trial_leaves_no_trace(make_pool: MakePool) -> None:
    torch.manual_seed(5)
    plain = make_pool(2, training=training_with(None))
    torch.manual_seed(5)
    compiled = make_pool(2, training=training_with(TRACED))
    after = torch.rand(3)
    torch.manual_seed(5)

    assert torch.equal(after, torch.rand(3))
    assert differences(plain.state_dict(), compiled.state_dict()) == []
    assert all(p.grad is None for env in compiled.envs for p in env.network.parameters())


@pytest.mark.slow
def test_a_run_goes_on_compiled_or_not(make_pool: MakePool) -> None:
    plain, compiled = (make_pool(2, training=training_with(compile)) for compile in (None, TRACED))
    for pool, other in ((plain, compiled), (compiled, plain)):
        grown_episode(pool)
        other.load_state_dict(pool.state_dict())
        assert differences(pool.state_dict(), other.state_dict()) == []


def test_a_copy_computes_with_its_own_weights(make_pool: MakePool) -> None:
    copy = deepcopy(make_pool(1, training=training_with(TRACED)).envs[0].network).eval()
    plain = make_pool(1).envs[0].network.eval()
    add_noise(copy)
    plain.load_state_dict(copy.state_dict())
    images = torch.rand(4, 1, 8, 8, generator=generator_of())

    with torch.inference_mode():
        torch.testing.assert_close(copy(images), plain(images))


def test_a_pool_that_is_gone_leaves_no_host_behind(make_pool: MakePool) -> None:
    pool = make_pool(2, training=training_with(TRACED))
    grown_episode(pool)
    hosts = WeakSet(env.network for env in pool.envs)
    assert len(hosts) == 2
    del pool
    gc.collect()

    assert len(hosts) == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_computed_twice_can_be_compiled(checkpointed: bool) -> None:
    tokens = torch.randint(12, (4, 8), generator=generator_of())
    results = []
    for compiled in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            host = GPT((8,), 12, width=16, blocks=2, heads=2, context=8, checkpoint_activations=checkpointed)
        if compiled:
            compile_parts(host, TRACED)
        outputs = host.train()(tokens)
        outputs.logsumexp(-1).mean().backward()
        results.append([outputs.detach(), *(p.grad for p in host.parameters())])

    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def broken(graph: Graph, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    raise KeyError("no such instruction")


def test_what_cannot_be_compiled_is_refused_in_one_line(make_pool: MakePool) -> None:
    with pytest.raises(
        ValueError, match=r"^the hosts cannot be compiled: .*no such instruction.*; mend that,"
    ) as caught:
        make_pool(1, training=training_with(CompileConfig(backend=broken)))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^the hosts cannot be compiled: Invalid backend: 'inductr'.*"):
        make_pool(1, training=training_with(CompileConfig(backend="inductr")))


def test_a_fallback_says_so_once_and_hosts_run_as_they_are(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    compiling._warn_once.cache_clear()
    training = training_with(CompileConfig(backend=broken, fallback=True))
    with caplog.at_level(logging.WARNING, logger=compiling.__name__):
        pools = [make_pool(2, training=training) for _ in range(2)]

    (said,) = [record.message for record in caplog.records if record.name == compiling.__name__]
    assert said.startswith("the hosts are not compiled: ") and "no such instruction" in said
    plain = make_pool(2, training=training_with(None))
    for ours, theirs in zip(grown_episode(pools[0]), grown_episode(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_executors_that_cannot_run_compiled_hosts_say_so(make_pool: MakePool, executor: str) -> None:
    with pytest.raises(ValueError, match=f"^executor '{executor}' cannot run compiled hosts; use env.executor loop"):
        make_pool(1, executor=executor, training=training_with(TRACED))
    assert executor not in {choice.executor for choice in available_choices(CPU, training_with(TRACED))}, "auto knows"


@pytest.mark.slow
def test_all_of_it_can_be_set_from_the_command_line(tmp_path: Path) -> None:
    flags = (f"--data.env.training.compile.{name}={value}" for name, value in asdict(ODD).items())
    built = fit(tmp_path, "--trainer.max_epochs=1", "--data.env.horizon=1", *flags)

    assert built.datamodule.env.training.compile == ODD
    saved = yaml.safe_load((only_run(tmp_path).folder / "config.yaml").read_text())
    assert saved["data"]["env"]["training"]["compile"] == asdict(ODD)


def test_a_host_without_parts_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            self.slots = small_cnn().slots

    with pytest.raises(ValueError, match=r"no module of theirs holds parameters and no slot; leave training\.compile"):
        compile_parts(Bare(), TRACED)


def is_compiled(value: object) -> bool:
    """Return whether a function or module was compiled by torch.compile."""
    return "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})


def compiled(pool: HostPool) -> list[bool]:
    """Return for every module of every host whether it is compiled."""
    return ["forward" in vars(part) for env in pool.envs for part in parts_without_slots(env.network)]


def test_compiling_is_a_setting_of_a_run(make_pool: MakePool) -> None:
    """S10: compiling is off by default; on, it holds for that run's hosts alone, module by module, and no global switch
    of torch's compiler moves."""
    training = HostTraining(batches=1, compile=CompileConfig(backend="eager"))
    switches = torch._dynamo.config.get_config_copy()

    assert HostTraining().compile is None
    assert isinstance(CompileConfig().dynamic, bool) and not CompileConfig().fallback
    assert all(compiled(make_pool(1, training=training)))
    assert not any(compiled(make_pool(1)))
    assert torch._dynamo.config.get_config_copy() == switches


def test_no_module_compiles_anything_when_it_is_imported() -> None:
    """S10: no module of the project holds a compiled function: torch.compile is called for the hosts of a run alone."""
    names = [found.name for found in pkgutil.walk_packages(esper_lightning.__path__, "esper_lightning.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    compiled = torch.compile(lambda x: x, backend="eager")

    assert is_compiled(compiled) and len(modules) > 80
    values = [(name, value) for module in modules for name, value in vars(module).items()]
    # Torch itself adds names with two underscores for functions that it has compiled.
    assert [name for name, value in values if is_compiled(value) and not name.startswith("__")] == []
