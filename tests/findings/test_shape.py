"""Rows A of the findings: how the code is cut."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from esper_lightning.envs import HEADS, Action, HostPool, StepResult
from esper_lightning.envs.observation import features
from esper_lightning.evaluation.compare import play
from esper_lightning.rollout import RolloutLoop
from esper_lightning.tamiyo.baselines import RandomValid
from esper_lightning.tamiyo.controller import LearnedController
from esper_lightning.tamiyo.heuristic import Heuristic
from esper_lightning.tamiyo.policy import Policy
from tests.conftest import FREE
from tests.runs import ROOT

SOURCES = [path for folder in ("esper_lightning", "callbacks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
PACKAGE = [path for path in SOURCES if "benchmarks" not in path.parts]

LONGEST = 50
"""Lines of a function: about a screen."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def calls_of(path: Path, method: str) -> int:
    nodes = ast.walk(ast.parse(path.read_text()))
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        for node in nodes
    )


def test_a1_there_is_one_train_step_and_no_long_function() -> None:
    """A1: hosts learn in one place, or all at once in another, which know no stage; functions fit on a screen."""
    rooms = (ROOT / "esper_lightning" / "envs", ROOT / "esper_lightning" / "tamiyo")
    stepping = [path for room in rooms for path in room.rglob("*.py") if calls_of(path, "backward")]

    # The third trains nothing: it compares gradients.
    assert sorted(path.name for path in stepping) == ["executor.py", "proof.py", "step.py"]
    for path in stepping:
        if path.name != "proof.py":
            assert calls_of(path, "backward") == 1
            assert "Stage" not in path.read_text()
    assert not [f.name for path in SOURCES for f in functions(path) if f.end_lineno - f.lineno >= LONGEST]


def test_a2_every_controller_goes_through_the_same_step(
    make_loop: Callable[..., RolloutLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: practice, the learned policy's evaluation and the heuristic share HostPool.step."""
    loop = make_loop(2)
    pool, stepped, real = loop.pool, [], HostPool.step

    def watched(self: HostPool, action: Action) -> StepResult:
        stepped.append(self)
        return real(self, action)

    monkeypatch.setattr(HostPool, "step", watched)
    loop.begin_rollout()
    loop.tick()
    assert stepped == [pool]
    for controller in (LearnedController(loop.policy, loop.observation_norm), Heuristic()):
        stepped.clear()
        play(pool, "any", controller, [1, 2])
        assert stepped == [pool] * pool.config.horizon


def names_in(node: ast.AST) -> Iterator[str]:
    """Names that are read, attributes, and the last word of every string; not what a module offers in `__all__`."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.rpartition(".")[2]
    for child in ast.iter_child_nodes(node):
        yield from names_in(child)


def test_a3_nothing_is_defined_that_nobody_uses() -> None:
    """A3: every function and class of a module is named in code, in a config or shown to users; blueprints register."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    used = {name for tree in trees for name in names_in(tree)}
    used |= {word for path in (ROOT / "configs").glob("*.yaml") for word in re.findall(r"\w+", path.read_text())}
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r"^```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)  # a test runs it
    used |= {name for block in shown for name in names_in(ast.parse(block))}
    settings = re.findall(r"^```yaml.*\n(?:.*\n)*?```", pages, re.MULTILINE)
    used |= {word for block in settings for word in re.findall(r"\w+", block)}
    defined = [node for tree in trees for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    registered = {node.name for node in defined if any("register" in ast.unparse(d) for d in node.decorator_list)}

    assert len(defined) > 80 > len(registered) > 0
    assert {node.name for node in defined} - registered - used == set()


def test_a4_devices_are_devices_inside() -> None:
    """A4: what is called a device is a torch.device, and no call inside names one by a string."""
    strings = []
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg == "device":
                assert ast.unparse(node.annotation) in ("torch.device", "torch.device | None"), path
            if isinstance(node, ast.Call):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                texts = [arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                strings += [(path.name, text) for text in texts if text.partition(":")[0] in ("cpu", "cuda")]
                assert not (isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"), path

    # The edge: where snapshots are kept, where weights are put together in double precision, where files are read, and
    # where networks are made to be looked at.
    assert sorted(strings) == [
        ("attached.py", "cpu"),
        ("fold.py", "cpu"),
        ("reading.py", "cpu"),
        ("snapshot.py", "cpu"),
    ]


def torch_names(code: ast.AST) -> Iterator[str]:
    """What `code` imports from torch and reaches below it, in dots."""
    roots = {"torch": "torch"}
    for node in ast.walk(code):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if dotted.partition(".")[0] == "torch":
                    yield dotted
                    # `import torch.x` binds the name torch.
                    bare = isinstance(node, ast.Import) and alias.asname is None
                    roots["torch" if bare else alias.asname or alias.name] = "torch" if bare else dotted
    for node in ast.walk(code):
        path, value = [], node
        while isinstance(value, ast.Attribute):
            path.insert(0, value.attr)
            value = value.value
        if path and isinstance(value, ast.Name) and value.id in roots:
            yield ".".join([roots[value.id], *path])


def private_torch(code: ast.AST) -> set[str]:
    return {name for name in torch_names(code) if "._" in name}


def test_a5_only_public_torch_is_used() -> None:
    """A5: no underscored function or module of torch."""
    lines = "import torch._dynamo\nfrom torch import nn, _C\nnn.utils._x(1)\ntorch._foreach_norm(torch.y(self._z).w)\n"
    examples = {"torch._dynamo", "torch._C", "torch.nn.utils._x", "torch._foreach_norm"}
    assert private_torch(ast.parse(lines)) == examples, "the check below sees them"
    assert {path.name: names for path in SOURCES if (names := private_torch(ast.parse(path.read_text())))} == {}


def untyped(function: Function) -> bool:
    """Lacks an annotation, or has one that says nothing."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [arg.annotation for arg in named if arg is not None and arg.arg not in ("self", "cls")]
    annotations.append(function.returns)
    if None in annotations:
        return True
    texts = [ast.unparse(annotation) for annotation in annotations]
    return any("dict[str, dict" in text for text in texts) or any(
        isinstance(node, ast.Name) and node.id == "any" for annotation in annotations for node in ast.walk(annotation)
    )


def test_a7_every_signature_is_typed() -> None:
    """A7: every argument and result has a type, none is the function `any` or a dictionary of dictionaries."""
    lines = "def a(x): ...\ndef b(x: any) -> int: ...\ndef c() -> dict[str, dict]: ...\ndef d(*x: int): ...\n"
    examples = ast.parse(lines + "def e(self, x: int) -> None: ...\n").body
    assert [untyped(f) for f in examples] == [True, True, True, True, False], "the check below sees them"
    assert [f"{path.name}: {f.name}" for path in SOURCES for f in functions(path) if untyped(f)] == []


def test_a9_observations_and_actions_are_laid_out_as_their_names_say(
    make_loop: Callable[..., RolloutLoop], make_pool: Callable[..., HostPool], make_policy: Callable[..., Policy]
) -> None:
    """A9: every place in an observation is the feature of that name, and every head has the choices of its names."""
    loop = make_loop(2)
    pool, names, wanderer = loop.pool, loop.pool.feature_names, RandomValid(1)
    assert len(set(names)) == len(names)
    assert loop.buffer.observation.features.shape[-1] == loop.raw.shape[-1] == len(names)
    for _ in range(pool.config.horizon):
        pool.step(wanderer.act(pool))
        for env, row in zip(pool.envs, pool.observation.features, strict=True):
            expected = features(env, pool.config.objective)
            assert list(expected) == names
            torch.testing.assert_close(row, torch.tensor([expected[name] for name in names]), rtol=0, atol=0)

    free = make_pool(1, **FREE)
    for of, policy in ((pool, loop.policy), (free, make_policy(free))):
        choices = {head: table.output.out_features for head, table in policy.heads.tables.items()}
        offered = dict(zip(HEADS, of.space, strict=True))
        assert choices == {head: len(offered[head]) for head in choices}
        assert all(len(offered[head]) == 1 for head in set(HEADS) - set(choices))
        for head, axis in {"op": of.masks.op, "blueprint": of.masks.blueprint, "target": of.masks.target}.items():
            assert axis.shape[-1] == len(offered[head])
