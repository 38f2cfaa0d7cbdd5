"""What a checkpoint must hold to be continued: ours, whole, and of the run that is to go on."""

import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from esper_lightning.growth.reading import read_tensors
from esper_lightning.growth.restoring import check_count, check_finite, check_numbers, check_parts, load_optimizer

SCHEMA = 5
"""Raised whenever a checkpoint of before could no longer be continued."""

SCHEMA_KEY = "esper_schema"
IDENTITY_KEY = "esper_identity"
SETTINGS_KEY = "esper_settings"

PARTS: dict[str, type] = {
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": dict,
    "callbacks": dict,
    "HostPoolData": dict,
    "pytorch-lightning_version": str,
    IDENTITY_KEY: dict,
}

NUMPY_KEYS = 624
"""Of numpy's global generator; it takes any position among them on trust, and reads there."""


def stamp(checkpoint: dict[str, Any], identity: dict[str, Any]) -> None:
    """Marks a checkpoint as ours, and says of what run: see `check_identity`."""
    checkpoint[SCHEMA_KEY] = SCHEMA
    checkpoint[IDENTITY_KEY] = identity


def check_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint at `path`. Raises ValueError with one line unless it is whole and ours."""
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist; give the path of a .ckpt file")
    try:
        checkpoint = read_tensors(Path(path))
    except ValueError as error:
        raise ValueError(f"checkpoint {error}; give another one") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__}; give a Lightning checkpoint")
    try:
        check_schema(checkpoint)
    except ValueError as error:
        raise ValueError(f"checkpoint {str(path)!r}: {error}") from error
    return checkpoint


def check_schema(checkpoint: dict[str, Any]) -> None:
    """Raises ValueError, saying what is wrong, unless `checkpoint` is one that this version can continue."""
    if SCHEMA_KEY not in checkpoint:
        raise ValueError("it was not written by esper-lightning; give one from a run's checkpoints folder")
    if checkpoint[SCHEMA_KEY] != SCHEMA:
        raise ValueError(
            f"it has schema {checkpoint[SCHEMA_KEY]!r:.20}, this version reads {SCHEMA}; "
            f"resume it with the version that wrote it"
        )
    missing = [part for part in PARTS if part not in checkpoint]
    if not missing and "RolloutState" not in checkpoint["callbacks"]:
        missing = ["RolloutState"]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}, so it was not saved by a full run; give another one")
    for part, kind in PARTS.items():
        if not isinstance(checkpoint[part], kind):
            raise ValueError(f"{part} is a {type(checkpoint[part]).__name__}; give another checkpoint")
    for name, weights in checkpoint["state_dict"].items():
        if not isinstance(weights, Tensor):
            raise ValueError(f"{name!r:.80} is a {type(weights).__name__}, not a tensor; give another checkpoint")
        check_finite(str(name), weights)
    settings = checkpoint.get(SETTINGS_KEY, {})
    if not isinstance(settings, dict) or not all(type(text) is str for pair in settings.items() for text in pair):
        raise ValueError("its settings are no texts; give another checkpoint")
    rollout = check_parts("RolloutState", checkpoint["callbacks"]["RolloutState"], ("loop", "random"))
    check_random(rollout["random"])


def check_random(states: Any) -> None:
    """Raises ValueError unless these are states of the global generators."""
    check_parts("the random state", states, ("python", "numpy", "torch", "cuda"))
    numpy = states["numpy"]
    if not isinstance(numpy, list) or len(numpy) != 5 or numpy[0] != "MT19937":
        raise ValueError("the state of numpy's generator is of another kind")
    _, keys, position, has_gauss, gauss = numpy
    for key in check_numbers("the state of numpy's generator", keys, NUMPY_KEYS):
        check_count("a key of numpy's generator", key, 2**32 - 1)
    check_count("the position of numpy's generator", position, NUMPY_KEYS)
    check_count("the state of numpy's generator", has_gauss, 1)
    check_numbers("the state of numpy's generator", [gauss], finite=True)
    if not isinstance(states["cuda"], list) or not all(
        isinstance(s, Tensor) for s in (states["torch"], *states["cuda"])
    ):
        raise ValueError("the states of torch's generators are no tensors")


def check_identity(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError, naming the first difference, unless the run of `identity` can continue that of `saved`."""
    for name, ours in identity.items():
        before = saved.get(name, "nothing")
        if type(before) is not type(ours) or before != ours:
            raise ValueError(
                f"{name}: the checkpoint has {before!s:.200}, this run {ours!s:.200}; "
                f"resume with the config.yaml in the checkpoint's run folder"
            )


def check_loops(checkpoint: dict[str, Any], ours: dict[str, Any], hosts: Set[int]) -> None:
    """Raises ValueError unless Lightning's loops and the hosts stand where the rollout does.

    Args:
        checkpoint: Whose loops are looked at.
        ours: State of the fit loop before it begins.
        hosts: Ticks at which the restored hosts are.
    """
    saved = check_parts("loops", checkpoint["loops"], ("fit_loop",))["fit_loop"]
    _check_form("loops", saved, ours)
    rollout = check_parts("the rollout", checkpoint["callbacks"]["RolloutState"]["loop"], ("episode", "buffer"))
    ticks = check_parts("the rollout's buffer", rollout["buffer"], ("ticks",))["ticks"]
    if not isinstance(ticks, list) or not ticks or not all(isinstance(t, Tensor) and t.dim() >= 2 for t in ticks):
        raise ValueError("the rollout's buffer holds something else than tensors")
    length = len(ticks[0])
    batch, epoch = (saved[name]["current"]["ready"] for name in ("epoch_loop.batch_progress", "epoch_progress"))
    loader = saved["state_dict"].get("combined_loader")
    if batch != length or epoch != rollout["episode"] or loader not in ([{"position": length}], [{"position": 0}]):
        raise ValueError(f"its loops are at tick {batch} of rollout {epoch}, the rollout at tick {length}")
    if hosts != {length}:
        raise ValueError(f"its hosts are at ticks {sorted(hosts)}, the rollout at tick {length}")


def _check_form(what: str, saved: Any, ours: Any) -> None:
    """Raises ValueError unless `saved` has our names and types, and numbers that count something."""
    if type(saved) is not type(ours):
        raise ValueError(f"{what} is a {type(saved).__name__}, not a {type(ours).__name__}")
    if isinstance(ours, dict):
        check_parts(what, saved, ours)
        for name, value in ours.items():
            _check_form(f"{what}.{name}", saved[name], value)
    elif type(ours) is int:
        check_count(what, saved)


def settle_optimizer(checkpoint: dict[str, Any], fresh: Optimizer) -> None:
    """Gives the saved optimizer's state the settings of `fresh`. Raises ValueError unless it is one for `fresh`."""
    states = checkpoint["optimizer_states"]
    if len(states) != 1:
        raise ValueError(f"it holds {len(states)} optimizers; Tamiyo has one")
    settings = [{name: value for name, value in group.items() if name != "params"} for group in fresh.param_groups]
    load_optimizer(fresh, states[0])
    for group, ours in zip(fresh.param_groups, settings, strict=True):
        group.update(ours)
    for state in fresh.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                check_finite(f"the optimizer's {name}", value)
    checkpoint["optimizer_states"] = [fresh.state_dict()]


def bring_home(state: Any, folder: str) -> dict[str, Any] | None:
    """A ModelCheckpoint's state with every path in `folder`, or None if its checkpoints are not there.

    Paths are taken by their names alone: Lightning removes what they point to. So a run whose folder was moved still
    knows its best rollout, and a checkpoint from elsewhere can name no other file.
    """
    state = dict(check_parts("ModelCheckpoint", state, ("best_model_score", "best_model_path", "best_k_models")))
    kept = check_parts("ModelCheckpoint's best_k_models", state["best_k_models"], ())
    scores = [state["best_model_score"], state.get("current_score"), state.get("kth_value"), *kept.values()]
    if not all(score is None or (isinstance(score, Tensor) and score.numel() == 1) for score in scores):
        raise ValueError("ModelCheckpoint's scores are no numbers")
    paths = {name: state.get(name, "") for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    if not all(isinstance(path, str) for path in (*paths.values(), *kept)):
        raise ValueError("ModelCheckpoint's paths are no texts")

    def here(path: str) -> str:
        return os.path.join(folder, os.path.basename(path)) if path else ""  # noqa: PTH118, PTH119  # as Lightning does

    named = {here(path) for path in (*paths.values(), *kept) if path}
    if not all(Path(path).is_file() for path in named):
        return None
    if kept and here(paths["kth_best_model_path"]) not in map(here, kept):
        raise ValueError("ModelCheckpoint's worst checkpoint is none of those that it keeps")
    best = {here(path): score for path, score in kept.items()}
    return state | {name: here(path) for name, path in paths.items()} | {"dirpath": folder, "best_k_models": best}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed between the settings of a run so far and those of now, a line each."""
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name}: {before.get(name, 'nothing'):.200} before, {now.get(name, 'nothing'):.200} now"
        for name in names
        if before.get(name) != now.get(name)
    ]
