"""Patterns that the source must not contain: swallowed errors, unused code, devices as strings, private torch names."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.runs import ROOT

SOURCES = [path for folder in ("esper_lightning", "callbacks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
PACKAGE = [path for path in SOURCES if "benchmarks" not in path.parts]
tree_of = cache(lambda path: ast.parse(path.read_text()))
"""Return the syntax tree of a file."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def broad(caught: ast.AST) -> bool:
    """Return True if the caught classes include Exception or BaseException, under any module name."""
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(caught)}
    return bool(names & {"Exception", "BaseException"})


def swallowing(code: ast.AST) -> list[int]:
    """Return the lines where every error is caught or suppressed, or where a caught error is ignored."""
    lines = []
    for node in ast.walk(code):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            lines += [node.lineno] if node.type is None or broad(node.type) or silent else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            lines += [node.lineno] if any(map(broad, node.args)) else []
    return sorted(lines)


def test_no_broad_except() -> None:
    """F19: no code catches or suppresses every error, or ignores a caught one."""
    lines = "try:\n    f()\nexcept (KeyError, Exception):\n    g()\nexcept A:\n    pass\nexcept:\n    g()\n"
    assert swallowing(ast.parse(lines)) == [3, 5, 7], "the check below sees them"
    lines = "with suppress(Exception):\n    f()\nwith contextlib.suppress(KeyError, BaseException):\n    f()\n"
    lines += "with a, suppress(builtins.Exception):\n    f()\nwith suppress(KeyError):\n    f()\n"
    assert swallowing(ast.parse(lines)) == [1, 3, 5], "the check below sees them, too"
    assert len(SOURCES) > 40
    found = {str(path): swallowing(tree_of(path)) for path in SOURCES}
    assert {name: lines for name, lines in found.items() if lines} == {}


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
    shown = re.findall(r"^```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)  # a test runs it
    used |= {name for block in shown for name in names_in(ast.parse(block))}
    settings = re.findall(r"^```yaml.*\n(?:.*\n)*?```", pages, re.MULTILINE)
    used |= {word for block in settings for word in re.findall(r"\w+", block)}
    defined = [node for tree in trees for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    registered = {node.name for node in defined if any("register" in ast.unparse(d) for d in node.decorator_list)}

    assert len(defined) > 80 > len(registered) > 0
    called_by_python = {"__getattr__", "__dir__"}
    assert {node.name for node in defined} - registered - used - called_by_python == set()


def misnamed_devices(code: ast.AST) -> list[int]:
    """Return the lines where a `device` parameter has another type, or where a call is given a GPU by a string."""
    lines = []
    for node in ast.walk(code):
        if isinstance(node, ast.arg) and node.arg == "device":
            typed = node.annotation and ast.unparse(node.annotation)
            lines += [] if typed in ("torch.device", "torch.device | None") else [node.lineno]
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            texts = [arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            to_gpu = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
            lines += [node.lineno] if to_gpu or any(re.fullmatch(r"cuda(:\d+)?", text) for text in texts) else []
    return sorted(lines)


def test_devices_are_devices_inside() -> None:
    """A4: every `device` parameter is a torch.device, and no call is given a GPU by a string."""
    lines = "def a(device: str): ...\ndef b(device): ...\ndef c(device: torch.device | None): ...\nx.to('cuda:1')\n"
    lines += "x.cuda()\nf('cuda is missing', device='cuda')\nx.to(device)\n"
    assert misnamed_devices(ast.parse(lines)) == [1, 2, 4, 5, 6], "the check below sees them"
    found = {str(path): misnamed_devices(tree_of(path)) for path in PACKAGE}
    assert {name: lines for name, lines in found.items() if lines} == {}


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


DOCUMENTED_TORCH = {"torch.utils._python_dispatch.TorchDispatchMode"}
"""Names that torch's page "Extending PyTorch" tells users to import, although a part of them is underscored."""


def private_torch(code: ast.AST) -> set[str]:
    """Return the names of torch that have an underscored part and are not documented."""
    return {name for name in torch_names(code) if "._" in name} - DOCUMENTED_TORCH


def test_only_public_torch_is_used() -> None:
    """A5: the project uses no underscored function or module of torch."""
    lines = "import torch._dynamo\nfrom torch import nn, _C\nnn.utils._x(1)\ntorch._foreach_norm(torch.y(self._z).w)\n"
    examples = {"torch._dynamo", "torch._C", "torch.nn.utils._x", "torch._foreach_norm"}
    assert private_torch(ast.parse(lines)) == examples, "the check below sees them"
    found = {str(path): private_torch(tree_of(path)) for path in SOURCES}
    assert {name: names for name, names in found.items() if names} == {}
