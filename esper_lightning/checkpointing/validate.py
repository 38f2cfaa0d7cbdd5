"""Validation of checkpoints: written by this package, complete, and saved by the run that is to be resumed."""

import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_lightning.errors import DivergedError
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.serialization.checks import check_count, check_finite, check_keys, check_numbers, load_optimizer
from esper_lightning.serialization.excerpt import excerpt
from esper_lightning.serialization.safe_load import read_tensors

SCHEMA = 6
"""Version number of the checkpoint format; increased whenever checkpoints of the previous version cannot be resumed."""

SCHEMA_KEY = "esper_schema"
IDENTITY_KEY = "esper_identity"
SETTINGS_KEY = "esper_settings"
MODULE_KEY = "esper_module"
"""Key of the settings of the module and of the sizes of its policy."""

RULES_KEY = "esper_rules"
"""Key of the lifecycle and the actions of the training hosts, for those that the policy is to grow later."""

MAX_WEIGHT = 1e18
"""Largest weight or statistic of a policy: with larger ones products of two numbers overflow."""

UPDATED_KEY = "esper_updated"
"""Key of the weights that a resumed run goes on with, in a checkpoint that was chosen by its score. Its `state_dict`
holds the weights that played the rollout with that score."""

OTHER_RANKS_KEY = "random_of_other_ranks"
"""Key of the random states of all ranks but the first, in the state of the rollout; one rank has none."""

MODULE_PARTS: dict[str, type] = {"state_dict": dict, IDENTITY_KEY: dict, MODULE_KEY: dict}
"""Parts that restore the policy alone, with the type of each."""

REQUIRED_PARTS: dict[str, type] = MODULE_PARTS | {
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": dict,
    "callbacks": dict,
    "HostPoolData": dict,
    "pytorch-lightning_version": str,
}
"""Parts that every resumable checkpoint has, with the type of each."""

NUMPY_KEY_COUNT = 624
"""Number of keys in the state of numpy's global generator, which reads at the given position without a check."""


def write_identity(checkpoint: dict[str, Any], identity: dict[str, Any], module: dict[str, Any]) -> None:
    """Write the schema number, the identity of the run and the settings of its module into a checkpoint.

    Args:
        checkpoint: Checkpoint that Lightning is about to write.
        identity: Properties that a resumed run must share; see `check_identity`.
        module: Settings of the module and sizes of its policy, as plain data.
    """
    checkpoint[SCHEMA_KEY] = SCHEMA
    checkpoint[IDENTITY_KEY] = identity
    checkpoint[MODULE_KEY] = module


def check_schema(checkpoint: dict[str, Any]) -> None:
    """Raise ValueError with the reason unless this version can resume `checkpoint`."""
    check_policy(checkpoint, REQUIRED_PARTS)
    if "RolloutState" not in checkpoint["callbacks"]:
        raise ValueError("it lacks RolloutState, so it was not saved by a full run; give another one")
    settings = checkpoint.get(SETTINGS_KEY, {})
    if not isinstance(settings, dict) or not all(type(text) is str for pair in settings.items() for text in pair):
        raise ValueError("its settings are no texts; give another checkpoint")
    rollout = check_keys("RolloutState", checkpoint["callbacks"]["RolloutState"], ("loop", "normalisers", "random"))
    others = rollout.get(OTHER_RANKS_KEY, [])
    if not isinstance(others, list):
        raise ValueError("the random states of its other ranks are no list")
    for states in (rollout["random"], *others):
        check_random(states)


def check_policy(checkpoint: dict[str, Any], parts: Mapping[str, type] = MODULE_PARTS) -> None:
    """Raise ValueError with the reason unless this version can read the policy and the other `parts`."""
    if SCHEMA_KEY not in checkpoint:
        raise ValueError("it was not written by esper-lightning; give one from a run's checkpoints folder")
    schema = checkpoint[SCHEMA_KEY]
    if schema != SCHEMA:
        shown = f"{schema[:20]!r}" if isinstance(schema, str) else excerpt(schema, 20)
        raise ValueError(
            f"it has schema {shown}, this version reads {SCHEMA}; resume it with the version that wrote it"
        )
    missing = [part for part in parts if part not in checkpoint]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}, so it was not saved by a full run; give another one")
    for part, kind in parts.items():
        if not isinstance(checkpoint[part], kind):
            raise ValueError(f"{part} is a {type(checkpoint[part]).__name__}; give another checkpoint")
    check_keys("the updated policy", checkpoint.get(UPDATED_KEY, {}), ())
    for name, weights in [*checkpoint["state_dict"].items(), *checkpoint.get(UPDATED_KEY, {}).items()]:
        if not isinstance(weights, Tensor):
            raise ValueError(
                f"{excerpt(name, 80)} is a {type(weights).__name__}, not a tensor; give another checkpoint"
            )
        check_finite(str(name), weights)
        if weights.is_floating_point() and weights.numel():
            low, high = (float(number) for number in weights.double().aminmax())
            lowest = 0.0 if str(name).endswith((".var", ".count")) else -MAX_WEIGHT
            if low < lowest or high > MAX_WEIGHT:
                raise ValueError(
                    f"{name} holds numbers from {low:.3g} to {high:.3g}, and {lowest:g} to {MAX_WEIGHT:g} are "
                    f"possible; give another checkpoint"
                )


def open_checkpoint(path: str | Path, check: Callable[[dict[str, Any]], None] = check_schema) -> dict[str, Any]:
    """Return the checkpoint at `path`. Raises ValueError, in one line, unless this package wrote it and `check` accepts
    it."""
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist; give the path of a .ckpt file")
    try:
        checkpoint = read_tensors(Path(path))
    except ValueError as error:
        raise ValueError(f"checkpoint {error}; give another one") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__}; give a Lightning checkpoint")
    try:
        check(checkpoint)
    except ValueError as error:
        raise ValueError(f"checkpoint {str(path)!r}: {error}") from error
    return checkpoint


def policy_parts(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a checkpoint that describe its policy, without the hosts, which may be large."""
    return {part: checkpoint[part] for part in (*MODULE_PARTS, SETTINGS_KEY, RULES_KEY) if part in checkpoint}


@contextmanager
def checkpoint_errors(path: str | Path, use: str) -> Iterator[None]:
    """Turn the errors of a checkpoint that does not fit into one ValueError of one line.

    Args:
        path: Path of the checkpoint.
        use: What the checkpoint is needed for, as in "evaluated".
    """
    try:
        yield
    # For a damaged checkpoint torch raises many kinds of errors: other names, other shapes, missing keys.
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be {use}: {' '.join(str(error).split())}") from error


def check_saved_policy(checkpoint: dict[str, Any]) -> None:
    """Raise DivergedError if policy, normalisers or optimizer state are not finite, because no run could load them."""
    parts = ("state_dict", UPDATED_KEY, "optimizer_states")
    tensors = [t for part in parts for t in iter_tensors(checkpoint.get(part)) if t.is_floating_point()]
    # Optimizers may keep the step counts on the CPU. A single transfer for all tensors of a device.
    for device in {tensor.device for tensor in tensors}:
        if not torch.stack([t.isfinite().all() for t in tensors if t.device == device]).all():
            raise DivergedError(
                "the policy, its normalisers or its optimizer are not finite, so they are not saved; lower model.ppo.lr"
            )


def check_random(states: Any) -> None:
    """Raise ValueError unless `states` holds valid states of the global random number generators."""
    check_keys("the random state", states, ("python", "numpy", "torch", "cuda"))
    numpy = states["numpy"]
    if not isinstance(numpy, list) or len(numpy) != 5 or numpy[0] != "MT19937":
        raise ValueError("the state of numpy's generator is of another kind")
    _, keys, position, has_gauss, gauss = numpy
    for key in check_numbers("the list of keys of numpy's generator", keys, NUMPY_KEY_COUNT):
        check_count("a key of numpy's generator", key, 2**32 - 1)
    check_count("the position of numpy's generator", position, NUMPY_KEY_COUNT)
    check_count("has_gauss of numpy's generator", has_gauss, 1)
    check_numbers("the stored normal number of numpy's generator", [gauss], finite=True)
    if not isinstance(states["cuda"], list) or not all(
        isinstance(s, Tensor) for s in (states["torch"], *states["cuda"])
    ):
        raise ValueError("the states of torch's generators are not tensors")


def check_identity(
    saved: dict[str, Any],
    identity: dict[str, Any],
    advice: str = "resume with the config.yaml in the checkpoint's run folder",
) -> None:
    """Raise ValueError, naming the first difference, unless the run that wrote a checkpoint fits this one.

    Args:
        saved: Identity in the checkpoint.
        identity: Identity of this run, or a part of it; every property in it must be equal.
        advice: End of the error message.
    """
    for name, value in identity.items():
        saved_value = saved.get(name, "nothing")
        if type(saved_value) is not type(value) or saved_value != value:
            raise ValueError(f"{name}: the checkpoint has {excerpt(saved_value)}, this run {excerpt(value)}; {advice}")


def check_loops(checkpoint: dict[str, Any], expected: dict[str, Any], host_ticks: Set[int]) -> None:
    """Raise ValueError unless Lightning's loops and the hosts are at the same tick as the rollout.

    Args:
        checkpoint: Checkpoint whose loops are checked.
        expected: State of this run's fit loop before it begins, as a reference for names and types.
        host_ticks: Tick counters of the restored hosts.
    """
    saved = check_keys("loops", checkpoint["loops"], ("fit_loop",))["fit_loop"]
    _check_structure("loops", saved, expected)
    rollout = check_keys("the rollout", checkpoint["callbacks"]["RolloutState"]["loop"], ("episode", "buffer"))
    ticks = check_keys("the rollout's buffer", rollout["buffer"], ("ticks",))["ticks"]
    if not isinstance(ticks, list) or not ticks or not all(isinstance(t, Tensor) and t.dim() >= 2 for t in ticks):
        raise ValueError("the rollout's buffer holds something else than tensors")
    length = len(ticks[0])
    batch, epoch = (saved[name]["current"]["ready"] for name in ("epoch_loop.batch_progress", "epoch_progress"))
    loader = saved["state_dict"].get("combined_loader")
    if batch != length or epoch != rollout["episode"] or loader not in ([{"position": length}], [{"position": 0}]):
        raise ValueError(f"its loops are at tick {batch} of rollout {epoch}, the rollout at tick {length}")
    if host_ticks != {length}:
        raise ValueError(f"its hosts are at ticks {sorted(host_ticks)}, the rollout at tick {length}")


def _check_structure(label: str, saved: Any, expected: Any) -> None:
    """Raise ValueError unless `saved` has the names and types of `expected`, and its integers are valid counts."""
    if type(saved) is not type(expected):
        raise ValueError(f"{label} is a {type(saved).__name__}, not a {type(expected).__name__}")
    if isinstance(expected, dict):
        check_keys(label, saved, expected)
        for name, value in expected.items():
            _check_structure(f"{label}.{name}", saved[name], value)
    elif type(expected) is int:
        check_count(label, saved)


def adapt_optimizer_state(checkpoint: dict[str, Any], fresh: Optimizer) -> None:
    """Replace the settings in the saved optimizer state by those of `fresh`. Raises ValueError if it does not fit."""
    states = checkpoint["optimizer_states"]
    if len(states) != 1:
        raise ValueError(f"it holds {len(states)} optimizers; Tamiyo has one")
    settings = [{name: value for name, value in group.items() if name != "params"} for group in fresh.param_groups]
    load_optimizer(fresh, states[0])
    for group, group_settings in zip(fresh.param_groups, settings, strict=True):
        group.update(group_settings)
    for state in fresh.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                check_finite(f"the optimizer's {name}", value)
    checkpoint["optimizer_states"] = [fresh.state_dict()]


def relocate_checkpoint_paths(state: Any, folder: str) -> dict[str, Any] | None:
    """Return a ModelCheckpoint's state with every path moved to `folder`, or None if its checkpoints are not there.

    Only the file names are used, because Lightning removes the files that the paths point to. A run whose folder was
    moved keeps its best checkpoint, and a foreign checkpoint cannot name files outside of `folder`.
    """
    state = dict(check_keys("ModelCheckpoint", state, ("best_model_score", "best_model_path", "best_k_models")))
    best_models = check_keys("ModelCheckpoint's best_k_models", state["best_k_models"], ())
    scores = [state["best_model_score"], state.get("current_score"), state.get("kth_value"), *best_models.values()]
    if not all(score is None or (isinstance(score, Tensor) and score.numel() == 1) for score in scores):
        raise ValueError("ModelCheckpoint's scores are not numbers")
    paths = {name: state.get(name, "") for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    if not all(isinstance(path, str) for path in (*paths.values(), *best_models)):
        raise ValueError("ModelCheckpoint's paths are not strings")

    def relocated(path: str) -> str:
        return os.path.join(folder, os.path.basename(path)) if path else ""  # noqa: PTH118, PTH119  # as Lightning does

    named = {relocated(path) for path in (*paths.values(), *best_models) if path}
    if not all(Path(path).is_file() for path in named):
        return None
    if best_models and relocated(paths["kth_best_model_path"]) not in map(relocated, best_models):
        raise ValueError("ModelCheckpoint's worst checkpoint is not among its best checkpoints")
    best = {relocated(path): score for path, score in best_models.items()}
    return state | {name: relocated(path) for name, path in paths.items()} | {"dirpath": folder, "best_k_models": best}


MAX_DIFFERENCES = 100
"""Largest number of printed settings; a checkpoint of others may hold any number."""


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that differs between the resumed run and this one, and at most so many."""
    names = [*now, *(name for name in before if name not in now)]
    differing = [name for name in names if before.get(name) != now.get(name)]
    lines = [
        f"{name:.200}: {before.get(name, 'nothing'):.200} before, {now.get(name, 'nothing'):.200} now"
        for name in differing[:MAX_DIFFERENCES]
    ]
    further = len(differing) - len(lines)
    return [*lines, f"{further} more settings differ"] if further else lines
