"""What holds for the code as a whole: imports go one way, all is documented, every setting can be set from YAML."""

import ast
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from esper_lightning.envs import ActionConfig, EnvConfig
from esper_lightning.envs.training import HostTraining
from esper_lightning.governor import GovernorConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.module import NormalizeConfig
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.rewards import ObjectiveConfig, RewardConfig
from esper_lightning.tamiyo.heuristic import HeuristicConfig
from esper_lightning.tamiyo.policy import PolicyConfig
from esper_lightning.tasks import AugmentConfig
from esper_lightning.telemetry.rules import RULES, AnomalyConfig, Bounds
from tests.runs import CONFIGS, ROOT, cli

ROOMS = (
    {"growth", "blueprints"},
    {"hosts"},
    {"tasks"},
    {"envs"},
    {"tamiyo"},
    {"ppo"},
    {"rollout", "module", "grounds", "data", "vector_data", "resuming"},
    {"evaluation"},
    {"endings", "suggestions", "completion", "parser", "disk", "trainer", "provenance", "cli"},
    {"__main__"},
)
"""Each may import from itself and from those before it."""

LEAVES: dict[str, set[str]] = {
    "rewards": {"growth.stages"},
    "governor": set(),
    "telemetry": {"growth.stages", "growth.restoring"},
    "checkpoint": {"growth.reading", "growth.restoring"},
}
"""Numbers in, numbers out: what else of the package each may import."""

PACKAGE = sorted((ROOT / "esper_lightning").rglob("*.py"))
MODULES = [*PACKAGE, *sorted((ROOT / "callbacks").glob("*.py"))]


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported when the code runs, wherever the import stands."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield from imports(child)


def imported_from_package(path: Path) -> set[str]:
    """What a module imports from the package, without the package's name."""
    prefix = "esper_lightning."
    found = imports(ast.parse(path.read_text()))
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


def rooms_used(path: Path) -> set[str]:
    return {room_of(name) for name in imported_from_package(path)}


def libraries_used(path: Path) -> set[str]:
    return {room_of(name) for name in imports(ast.parse(path.read_text()))}


def room_of(dotted: str) -> str:
    return dotted.partition(".")[0]


def room_of_file(path: Path) -> str:
    return path.relative_to(ROOT / "esper_lightning").parts[0].removesuffix(".py")


def rank(room: str) -> int:
    return next(i for i, rooms in enumerate(ROOMS) if room in rooms)


def test_the_checks_below_see_imports() -> None:
    code = ast.parse("import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d.e import g, h\n")

    assert list(imports(code)) == ["a.b", "d.e.g", "d.e.h"]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of_file(path)
    if room == "__init__":
        assert not rooms_used(path) & {"cli", "__main__"}
    elif room in LEAVES:
        others = {name for name in imported_from_package(path) if room_of(name) != room}
        assert not [name for name in others if not name.startswith(tuple(LEAVES[room]))]
    else:
        assert not [used for used in rooms_used(path) - set(LEAVES) if rank(used) > rank(room)]


def test_the_package_never_imports_callbacks() -> None:
    assert not [path for path in PACKAGE if "callbacks" in libraries_used(path)]


def test_what_grows_is_useful_without_reinforcement_learning() -> None:
    growing = [path for path in PACKAGE if room_of_file(path) in {"growth", "blueprints", "hosts"}]

    assert growing
    assert not [path for path in growing if libraries_used(path) & {"lightning", "pytorch_lightning"}]
    assert not [path for path in growing if rooms_used(path) & {"envs", "tamiyo", "ppo", "rewards"}]


def test_growing_a_network_loads_neither_lightning_nor_environments() -> None:
    """In a process of its own: here they are loaded already."""
    code = "import sys, esper_lightning.growth.network, esper_lightning.hosts; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert not {"lightning", "sklearn", "esper_lightning.envs"} & set(loaded.split())


def test_modules_and_public_classes_say_what_they_are() -> None:
    silent = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent += [path.name for _ in range(not ast.get_docstring(tree))]
        silent += [f"{path.name}: {node.name}" for node in classes if not ast.get_docstring(node)]
    assert not silent


SETTINGS: dict[str, type] = {
    "model.policy": PolicyConfig,
    "model.ppo": PPOConfig,
    "model.ppo.lr": Anneal,
    "model.ppo.entropy": Anneal,
    "model.normalize": NormalizeConfig,
    "data.env": EnvConfig,
    "data.env.training": HostTraining,
    "data.env.training.augment": AugmentConfig,
    "data.env.lifecycle": LifecycleConfig,
    "data.env.actions": ActionConfig,
    "data.env.objective": ObjectiveConfig,
    "data.env.reward": RewardConfig,
    "data.env.governor": GovernorConfig,
    "evaluation.heuristic": HeuristicConfig,
    "telemetry.anomalies": AnomalyConfig,
    "telemetry.anomalies.kl": Bounds,
}

LINKED = {"data.env.reward": {"gamma", "horizon_is_end"}}
"""Fields that are taken from another setting, and cannot be set themselves."""


def field_docs(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(inspect.getsource(config)).body[0].body
    return {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def squeezed(text: str) -> str:
    """Without white space: help breaks lines wherever it likes."""
    return re.sub(r"\s+", "", text)


@pytest.fixture(scope="module")
def help_of_options() -> dict[str, str]:
    """What `fit --help` says, by option; of an option with options of its own: the title above them."""
    said = {}
    title = ""
    for block in re.split(r"^(?=  --|\S)", printed("--help"), flags=re.MULTILINE):
        if block.startswith("  --"):
            said[block.split()[0].removeprefix("--").rstrip(",")] = squeezed(title + block)
            title = ""
        else:
            title = block.replace(":", ".")
    return said


@pytest.fixture(scope="module")
def printed_config() -> dict[str, Any]:
    """Every setting as YAML."""
    return yaml.safe_load(printed("--config", str(CONFIGS / "smoke.yaml"), "--print_config"))


def printed(*args: str) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        lines: list[str] = []
        patch.setattr(sys.stdout, "write", lambda text: lines.append(text) or len(text))
        cli(*args)
    return "".join(lines)


@pytest.mark.parametrize("prefix", SETTINGS)
def test_every_setting_is_reachable_from_yaml_and_explained_by_help(
    prefix: str, help_of_options: dict[str, str], printed_config: dict[str, Any]
) -> None:
    docs = field_docs(SETTINGS[prefix])
    section: Any = printed_config
    for key in prefix.split("."):
        section = section[key]

    assert set(docs) == {field.name for field in fields(SETTINGS[prefix])}
    assert set(section) == set(docs) - LINKED.get(prefix, set())
    for name in section:
        doc = docs[name]
        assert squeezed(doc) in help_of_options[f"{prefix}.{name}"], name


def test_anomalies_point_to_settings_that_there_are(printed_config: dict[str, Any]) -> None:
    for name in {name for rule in RULES for name in rule.settings}:
        section: Any = printed_config
        for key in name.split("."):
            assert key in section, name
            section = section[key]


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
