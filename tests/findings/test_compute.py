"""Rows S10 and S11 of the findings: what hosts are computed with."""

import ast
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.compiling import parts
from esper_lightning.envs.training import CompileConfig, HostTraining
from tests.decisions import WAIT, act
from tests.findings.test_shape import functions, torch_names
from tests.runs import ROOT

MakePool = Callable[..., HostPool]

PACKAGE = sorted((ROOT / "esper_lightning").rglob("*.py"))


def compiled(pool: HostPool) -> list[bool]:
    return ["forward" in vars(part) for env in pool.envs for part in parts(env.network)]


def test_s10_compiling_is_a_setting_of_a_run(make_pool: MakePool) -> None:
    """S10: off by default; on, it holds for that run's hosts, module by module, and says what to do about shapes."""
    training = HostTraining(batches=1, compile=CompileConfig(backend="eager"))

    assert HostTraining().compile is None
    assert isinstance(CompileConfig().dynamic, bool) and not CompileConfig().fallback
    assert all(compiled(make_pool(1, training=training)))
    assert not any(compiled(make_pool(1)))


def test_s10_nothing_of_torchs_compiler_is_set_or_asked_for_at_import() -> None:
    """S10: torch.compile is called in functions alone, and no global switch of the compiler is touched anywhere."""
    for path in PACKAGE:
        code = ast.parse(path.read_text())
        inside = [name for function in functions(path) for name in torch_names(function) if name == "torch.compile"]
        everywhere = [name for name in torch_names(code) if name == "torch.compile"]
        assert len(inside) >= len(everywhere), path.name
        # Counting asks for plain execution meanwhile, which leaves the compiler's settings as they are.
        allowed = ("torch.compiler", "torch.compiler.set_stance") if path.name == "meter.py" else ()
        touched = [name for name in torch_names(code) if "torch.compiler" in name or "config" in name]
        assert not set(touched) - set(allowed), path.name


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_s11_hosts_train_and_are_validated_in_the_precision_of_their_setting(
    make_pool: MakePool, precision: str, dtype: torch.dtype
) -> None:
    """S11: in both passes hosts compute in fp32, bf16 or fp16; the loss is scaled with the last alone."""
    pool = make_pool(1, training=HostTraining(batches=1, precision=precision))
    seen: set[tuple[bool, torch.dtype]] = set()

    def watch(network: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.add((network.training, outputs.dtype))

    pool.envs[0].network.register_forward_hook(watch)
    pool.step(act(WAIT))

    assert seen == {(True, dtype), (False, dtype)}
    assert pool.envs[0].scaler.is_enabled() is (precision == "fp16")
