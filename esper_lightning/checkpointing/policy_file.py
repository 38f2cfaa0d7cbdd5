"""Policies as safetensors files: weights, with all that is needed to use them and to trace them as JSON metadata.

Such a file is small and complete, while a checkpoint also holds the hosts and the optimizer.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from esper_lightning import __version__
from esper_lightning.checkpointing.validate import (
    HYPER_PARAMETERS_KEY,
    IDENTITY_KEY,
    MODULE_KEY,
    RULES_KEY,
    SCHEMA_KEY,
    check_policy,
    open_checkpoint,
)
from esper_lightning.serialization import replace_durably

POLICY_SUFFIX, CHECKPOINT_SUFFIX = ".safetensors", ".ckpt"
"""Endings of the names of files that hold a policy."""

POLICIES = Path(__file__).parents[1] / "policies"
"""Folder of the policies that come with the package."""

NAMED_POLICIES = {"tamiyo": "general.safetensors"}
"""Files in that folder, by the names that stand for them."""

METADATA_KEY = "policy"
"""Key of the JSON text in the metadata of a file."""

VERSIONS_KEY = "versions"
"""Part of the metadata with the versions of the software that trained the policy."""

DESCRIBED = (SCHEMA_KEY, IDENTITY_KEY, MODULE_KEY, HYPER_PARAMETERS_KEY, "datamodule_hyper_parameters", RULES_KEY)
"""Parts of a checkpoint that the metadata hold."""


def names_policy(name: str) -> bool:
    """Return True if a name stands for a policy, or is the path of a file with one."""
    return names_policy_alone(name) or name.endswith(CHECKPOINT_SUFFIX)


def names_policy_alone(name: str) -> bool:
    """Return True if a name stands for a policy without a run: one of the package, or a safetensors file."""
    return name in NAMED_POLICIES or name.endswith(POLICY_SUFFIX)


def write_policy(checkpoint: str | Path, path: str | Path, results: Mapping[str, str]) -> None:
    """Write the policy of a checkpoint to a safetensors file, which replaces an earlier one atomically.

    Args:
        checkpoint: Checkpoint of a run on hosts, or a safetensors file whose results are replaced. Its settings, which
            tell the hosts and the RNG seed of the training, go along.
        path: File to write.
        results: What was measured of the policy, as text by title.

    Raises ValueError, in one line, if the checkpoint is damaged or foreign.
    """
    parts = read_policy(checkpoint)
    versions = parts.get(VERSIONS_KEY) or {name: version(name) for name in ("torch", "lightning")} | {
        "esper-lightning": __version__
    }
    described = {part: parts[part] for part in DESCRIBED if part in parts}
    text = json.dumps(described | {VERSIONS_KEY: versions, "results": dict(results)})
    weights = {name: part.cpu().contiguous() for name, part in parts["state_dict"].items()}
    content = safetensors.torch.save(weights, metadata={METADATA_KEY: text})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_durably(Path(path), lambda file: file.write(content))


def read_policy(path: str | Path) -> dict[str, Any]:
    """Return the parts of a checkpoint that restore a policy, from a checkpoint, a safetensors file or by name.

    From a safetensors file come also its `versions` and `results`.

    Raises ValueError, in one line, if the file is missing, damaged or foreign.
    """
    name = str(path)
    if name in NAMED_POLICIES:
        path = POLICIES / NAMED_POLICIES[name]
        if not path.is_file():
            raise ValueError(
                f"no policy {name!r} comes with this version; train one with `esper-lightning fit --config general`, "
                f"and name its checkpoint"
            )
    if not str(path).endswith(POLICY_SUFFIX):
        return open_checkpoint(path, check_policy)
    if not Path(path).is_file():
        raise ValueError(f"policy {name!r} does not exist; give the path of a {POLICY_SUFFIX} file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            parts = json.loads((file.metadata() or {}).get(METADATA_KEY, ""))
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # the file is no mapping
        if not isinstance(parts, dict):
            raise ValueError("its description is no mapping")
        policy = parts | {"state_dict": weights}
        check_policy(policy)
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"policy {name!r} is damaged or no policy of this version: {error}") from error
    return policy
