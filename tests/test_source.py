"""The source as a whole: unused code, private names, imports, machines, and the requirements that tests hold."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.runs import ROOT

SOURCES = [path for folder in ("esper_lightning", "callbacks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
tree_of = cache(lambda path: ast.parse(path.read_text()))
"""Return the syntax tree of a file."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield names that are read, attributes, and the last word of every string, but not the names in `__all__`."""
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


def test_every_definition_has_a_user() -> None:
    """A3: every function and class of a module is used in code, configs or docs, or is registered."""
    trees = [tree_of(path) for path in SOURCES]
    used = {name for tree in trees for name in names_in(tree)}
    used |= {word for path in (ROOT / "configs").glob("*.yaml") for word in re.findall(r"\w+", path.read_text())}
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r"^```python.*?\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)  # a test runs it
    used |= {name for block in shown for name in names_in(ast.parse(block))}
    settings = re.findall(r"^```yaml.*\n(?:.*\n)*?```", pages, re.MULTILINE)
    used |= {word for block in settings for word in re.findall(r"\w+", block)}
    defined = [node for tree in trees for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    registered = {node.name for node in defined if any("register" in ast.unparse(d) for d in node.decorator_list)}

    assert len(defined) > 80 > len(registered) > 0
    called_by_python = {"__getattr__", "__dir__"}
    assert {node.name for node in defined} - registered - used - called_by_python == set()


def torch_names(code: ast.AST) -> Iterator[str]:
    """Yield the dotted names that `code` imports from torch or accesses below it."""
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


DOCUMENTED_TORCH = {"torch.utils._python_dispatch.TorchDispatchMode", "torch._dynamo.lookup_backend"}
"""Names that torch's pages "Extending PyTorch" and "Custom Backends" tell users to import, although a part of them is
underscored."""

COMPILER = "esper_lightning/runtime/compiled.py"
"""Only file that uses more: torch.compile has public names neither for its errors nor for its configuration."""


def private_torch(code: ast.AST) -> set[str]:
    """Return the names of torch that have an underscored part and are not documented."""
    return {name for name in torch_names(code) if "._" in name} - DOCUMENTED_TORCH


def test_only_public_torch_is_used() -> None:
    """A5: the project uses no underscored function or module of torch."""
    lines = "import torch._dynamo\nfrom torch import nn, _C\nnn.utils._x(1)\ntorch._foreach_norm(torch.y(self._z).w)\n"
    examples = {"torch._dynamo", "torch._C", "torch.nn.utils._x", "torch._foreach_norm"}
    assert private_torch(ast.parse(lines)) == examples, "the check below sees them"
    found = {str(path): private_torch(tree_of(path)) for path in SOURCES if path != ROOT / COMPILER}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.slow
def test_growing_a_network_loads_neither_lightning_nor_environments() -> None:
    """Run in a subprocess, since this one has already loaded the modules."""
    code = "import sys, esper_lightning.growth.lifecycle, esper_lightning.hosts; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert not {"lightning", "sklearn", "esper_lightning.envs"} & set(loaded.split())


PERSONAL = re.compile(r"/(?:work|root|home|Users|tmp/dev|tmp/pytest)/")
REGISTRY = re.compile(r"pythonhosted|pypi\.org|index-url|find-links|artifactory|download\.pytorch\.org")
OURS = [urlsplit(url).hostname for name, url in os.environ.items() if name.endswith("INDEX_URL")]


def test_no_file_of_the_project_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path != Path(__file__) and path.is_file():
            text = path.read_text(errors="ignore")
            found = [
                *PERSONAL.findall(text),
                *REGISTRY.findall(text),
                *(host for host in OURS if host and host in text),
            ]
            assert not found, name


TOOLS = {
    "A4": "pyright: a device is a torch.device inside, a string at the edge",
    "A6": "ruff PLR2004: no number without a name, but for whole ones",
    "A7": "ruff ANN: types on every signature",
    "A10": "review: a comment says why order or a stream makes code right",
}
"""Requirements that a tool holds."""


def test_every_requirement_is_held_by_a_test_whose_docstring_names_it_or_by_a_tool() -> None:
    """F are about correct results, S about speed, A about the shape of the code."""
    last = {"F": 23, "S": 17, "A": 13}
    required = {f"{kind}{number}" for kind, end in last.items() for number in range(1, end + 1)}
    trees = map(tree_of, (ROOT / "tests").rglob("test_*.py"))
    tests = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    held = {row for test in tests for row in re.findall(r"^([FSA]\d+): ", ast.get_docstring(test) or "")}

    assert held.isdisjoint(TOOLS)
    assert held | TOOLS.keys() == required
