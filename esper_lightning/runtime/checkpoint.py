"""Checkpoints and policy files: writing, reading and checking them, and resuming on another type of device.

A checkpoint belongs to this package if it has `SCHEMA_KEY`. It is read as plain data and tensors: no code in it runs.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from esper_lightning.runtime.console import DivergedError
from esper_lightning.runtime.machine import CPU, versions
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.runtime.serialization import excerpt, generator_device, replace_file

SCHEMA = 10
"""Version number of the checkpoint format; increased whenever checkpoints of the previous version cannot be resumed."""

SCHEMA_KEY = "esper_schema"
IDENTITY_KEY = "esper_identity"  # what a resumed run must share
MODULE_KEY = "esper_module"  # sizes of the policy, and the RNG seed of its training
RULES_KEY = "esper_rules"  # lifecycle, actions and observation of the training hosts, for networks to grow later
FEATURES_KEY = "observed features"  # of an identity
HORIZON_KEY = "data.env.horizon"  # of an identity
HYPER_PARAMETERS_KEY = "hyper_parameters"  # Lightning's: settings of the module
DATA_SETTINGS_KEY = "datamodule_hyper_parameters"  # Lightning's: settings of the data module

OTHER_RANKS_KEY = "random_of_other_ranks"
"""Key of the random states of all ranks but the first, in the state of the rollout; one rank has none."""

POLICY_PARTS = ("state_dict", HYPER_PARAMETERS_KEY, IDENTITY_KEY, MODULE_KEY)
"""Parts of a checkpoint that restore the policy alone."""

POLICY_SUFFIX, CHECKPOINT_SUFFIX = ".safetensors", ".ckpt"
"""Endings of the names of files that hold a policy."""

POLICIES = Path(__file__).parents[1] / "policies"
NAMED_POLICIES = {"tamiyo": "general.safetensors", "tamiyo_depth": "depth.safetensors"}
"""Policies that come with the package: their folder, and their files by the names that stand for them."""

METADATA_KEY, VERSIONS_KEY = "policy", "versions"
"""Key of the JSON text in the metadata of a policy file; and in it, of the software that trained the policy."""

DESCRIBED = (SCHEMA_KEY, IDENTITY_KEY, MODULE_KEY, HYPER_PARAMETERS_KEY, DATA_SETTINGS_KEY, RULES_KEY)
"""Parts of a checkpoint that the metadata of a policy file hold."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Plugin of a Trainer that writes checkpoints so that a crash keeps the previous one, on any file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)

        def write(draft: Path) -> None:
            with draft.open("wb") as file:  # not by its path, whose name would be in the file
                torch.save(checkpoint, file)

        replace_file(Path(path), write)

    def load_checkpoint(self, path: str | Path, *_: object, **__: object) -> dict[str, Any]:
        return read_checkpoint(path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint of Lightning, on the CPU, without running any code in it.

    Raises ValueError, in one line, if the file is missing, truncated, not plain data or of another kind.
    """
    name = repr(str(path))
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {name} does not exist; give the path of a .ckpt file")
    try:
        checkpoint = torch.load(path, map_location=CPU, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"checkpoint {name} is truncated, damaged or of another kind ({reason:.200}); give another one"
        ) from error
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        raise ValueError(f"{name} is no checkpoint of Lightning; give the path of a .ckpt file")
    return checkpoint


def check_policy(checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError with the reason unless this version can read the policy in a checkpoint."""
    if SCHEMA_KEY not in checkpoint:
        raise ValueError("it was not written by esper-lightning; give one from a run's checkpoints folder")
    if (schema := checkpoint[SCHEMA_KEY]) != SCHEMA:
        raise ValueError(f"it has schema {excerpt(schema, 20)}, this version reads {SCHEMA}; use the one that wrote it")
    if missing := [part for part in POLICY_PARTS if part not in checkpoint]:
        raise ValueError(f"it lacks {', '.join(missing)}, so it was not saved by a full run; give another one")
    for name, weights in checkpoint["state_dict"].items():
        if weights.is_floating_point() and not weights.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite; give another checkpoint")


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the first difference, unless a checkpoint has every property of this run's identity."""
    for name, value in identity.items():
        saved_value = saved.get(name, "nothing")
        # True == 1 and 1 == 1.0.
        if type(saved_value) is not type(value) or saved_value != value:
            raise ValueError(
                f"{name}: the checkpoint has {excerpt(saved_value)}, this run {excerpt(value)}; resume it with "
                f"the config.yaml of its run"
            )


def check_finite(checkpoint: Mapping[str, Any]) -> None:
    """Raise DivergedError if policy, normalisers or optimizer state are not finite, because no run could load them."""
    parts = ("state_dict", "optimizer_states")
    tensors = [t for part in parts for t in iter_tensors(checkpoint.get(part)) if t.is_floating_point()]
    # Optimizers may keep the step counts on the CPU. A single transfer for all tensors of a device.
    for device in {tensor.device for tensor in tensors}:
        if not torch.stack([t.isfinite().all() for t in tensors if t.device == device]).all():
            raise DivergedError(
                "the policy, its normalisers or its optimizer are not finite, so they are not saved; lower model.ppo.lr"
            )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one line for each setting, in nested mappings, that differs between a resumed run and this one."""
    lines = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {excerpt(old)} before, {excerpt(new)} now")
    return lines


def move_to_device(checkpoint: dict[str, Any], pool: dict[str, Any], *, device: torch.device, rng_seed: int) -> bool:
    """Change `checkpoint` in place so that it resumes on `device`. Returns False if it was saved on such a device.

    The state of a random generator is of no use on another type of device: exploration goes on with a generator that
    the RNG seed of the run and the next episode seed. The `pool` of the checkpoint loses its hosts, and an unfinished
    rollout is discarded, as if its ticks, each a batch of Lightning, had never been played.
    """
    fit, collector = checkpoint["loops"]["fit_loop"], checkpoint["callbacks"]["RolloutState"]["loop"]
    if generator_device(collector["generator"]) in (None, device.type):
        return False
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
    discarded = 0 if batches["is_last_batch"] else batches["current"]["ready"]
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= batches["current"]["completed"] if discarded else 0
    for count in batches["current"]:
        batches["total"][count] -= batches["current"][count] if discarded else 0
        batches["current"][count] = 0
    batches["is_last_batch"] = False
    for progress in epochs.values():
        progress["ready"] = progress["started"] = progress["completed"] = progress["processed"]
    for loader in fit["state_dict"]["combined_loader"]:
        loader["position"] = 0
    episode = collector["episode"] - (discarded > 0)
    new_rng_seed = int(np.random.SeedSequence([rng_seed, episode]).generate_state(1)[0])
    generator = torch.Generator(device).manual_seed(new_rng_seed).get_state()
    kept = {"ticks": collector["ticks"] - discarded, "episode": episode, "generator": generator}
    checkpoint["callbacks"]["RolloutState"]["loop"] = kept
    pool["envs"] = []
    return True


@contextmanager
def checkpoint_errors(path: str | Path, use: str) -> Iterator[None]:
    """Turn the errors of a checkpoint that does not fit into one ValueError: it cannot be `use`, such as evaluated."""
    try:
        yield
    # For a damaged checkpoint torch raises many kinds of errors: other names, other shapes, missing keys.
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be {use}: {' '.join(str(error).split())}") from error


# Policy files: weights as safetensors, with all that is needed to use and to trace them as JSON metadata.


def names_policy(name: str) -> bool:
    """Return True if a name stands for a policy of the package, or is the path of a file with one."""
    return name in NAMED_POLICIES or name.endswith((POLICY_SUFFIX, CHECKPOINT_SUFFIX))


def write_policy(checkpoint: str | Path, path: str | Path, results: Mapping[str, str]) -> None:
    """Write the policy of a checkpoint, or of a policy file, to the safetensors file `path`, with all settings.

    `results` are texts by title about what was measured. Raises ValueError if the checkpoint is damaged or foreign.
    """
    parts = read_policy(checkpoint)
    described = {part: parts[part] for part in DESCRIBED if part in parts}
    text = json.dumps(described | {VERSIONS_KEY: parts.get(VERSIONS_KEY) or versions(), "results": dict(results)})
    weights = {name: part.cpu().contiguous() for name, part in parts["state_dict"].items()}
    content = safetensors.torch.save(weights, metadata={METADATA_KEY: text})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), lambda draft: draft.write_bytes(content))


def read_policy(path: str | Path) -> dict[str, Any]:
    """Return the parts of a checkpoint that restore a policy, from a checkpoint, a safetensors file or by name.

    Raises ValueError, in one line, if the file is missing, damaged or foreign.
    """
    name = str(path)
    if name in NAMED_POLICIES:
        path = POLICIES / NAMED_POLICIES[name]
    if not str(path).endswith(POLICY_SUFFIX):
        policy = read_checkpoint(path)
    elif not Path(path).is_file():
        raise ValueError(f"policy {name!r} does not exist; give the path of a {POLICY_SUFFIX} file")
    else:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                policy = dict(json.loads((file.metadata() or {}).get(METADATA_KEY, "")))
                policy["state_dict"] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"policy {name!r} is damaged or no policy of this version: {error}") from error
    try:
        check_policy(policy)
    except ValueError as error:
        raise ValueError(f"policy {name!r}: {error}") from error
    return policy
