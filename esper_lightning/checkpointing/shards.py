"""Hosts of a large checkpoint, in one file per process beside the main file.

A run of several processes gathers the states of its hosts into its checkpoint, unless they are larger than `MAX_BYTES`.
Then each process writes those of its own hosts: `latest.ckpt` has them in `latest.hosts/<token>/0001-of-0004.pt`. Every
save has a token of its own, so the files of the earlier checkpoint are whole until the main file is replaced.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper_lightning.ranks import Ranks
from esper_lightning.serialization.checks import check_count, check_keys
from esper_lightning.serialization.replace import replace_durably
from esper_lightning.serialization.safe_load import read_tensors

MAX_BYTES = 10**9
"""Largest size of the states of all hosts that one process gathers, in bytes."""

SHARDS_KEY = "shards"
"""Key of the description of the files, in the state of a pool."""

TOKEN = re.compile(r"[0-9a-f]{16}")


def shards_folder(checkpoint: str | Path) -> Path:
    """Return the folder beside a checkpoint with the files of its hosts."""
    return Path(checkpoint).with_suffix(".hosts")


def write_shard(checkpoint: str | Path, token: str, content: bytes, *, ranks: Ranks) -> dict[str, Any] | None:
    """Write the serialised states of this rank's hosts, and return the description of all ranks' files on rank 0.

    Args:
        checkpoint: Path of the checkpoint that is about to be written.
        token: Name of this save, the same on all ranks.
        content: List of states, as written by torch.save.
        ranks: The processes of the run.
    """
    path = shards_folder(checkpoint) / token / shard_name(ranks.rank, ranks.world)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, lambda file: file.write(content))
    checksums = ranks.gather(hashlib.sha256(content).hexdigest())
    return {"token": token, "sizes": ranks.sizes, "checksums": checksums} if checksums else None


def shard_name(rank: int, world: int) -> str:
    return f"{rank + 1:04}-of-{world:04}.pt"


def count_sharded(description: Any) -> int:
    """Return the number of hosts in the files. Raises ValueError if the description is damaged."""
    sizes = check_keys("the list of files with hosts", description, ("sizes",))["sizes"]
    return sum(check_count("a number of hosts", size) for size in sizes)


def read_shards(checkpoint: str | Path, description: Mapping[str, Any], ranks: Ranks) -> list[Any]:
    """Return the states of this rank's hosts from the files of any number of ranks.

    Raises ValueError if a file is missing or damaged, or if it belongs to another checkpoint.
    """
    check_keys("the list of files with hosts", description, ("token", "sizes", "checksums"))
    token, checksums = description["token"], description["checksums"]
    if not isinstance(token, str) or TOKEN.fullmatch(token) is None or not isinstance(checksums, list):
        raise ValueError("the list of files with hosts is damaged")
    writers = Ranks(description["sizes"], 0, len(checksums))
    states: dict[int, Any] = {}
    for rank, checksum in enumerate(checksums):
        owned = writers.own_of(rank)
        if set(owned).isdisjoint(ranks.own):
            continue
        path = shards_folder(checkpoint) / token / shard_name(rank, len(checksums))
        states |= zip(owned, _read_shard(path, checksum, len(owned)), strict=True)
    return [states[host] for host in ranks.own]


def _read_shard(path: Path, checksum: Any, hosts: int) -> Sequence[Any]:
    if not path.is_file():
        raise ValueError(f"{path}, which has a part of its hosts, is missing; copy it beside the checkpoint")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
            raise ValueError(f"{path} is damaged, or belongs to another checkpoint")
    found = read_tensors(path)
    if not isinstance(found, list) or len(found) != hosts:
        raise ValueError(f"{path} does not hold {hosts} hosts")
    return found


def remove_other_shards(checkpoint: str | Path, description: Mapping[str, Any] | None) -> None:
    """Remove the files of earlier saves of a checkpoint, once it is replaced; None: it has no files of its own."""
    folder = shards_folder(checkpoint)
    if not folder.is_dir() or folder.is_symlink():
        return
    for other in folder.iterdir():
        if TOKEN.fullmatch(other.name) and not (description and other.name == description["token"]):
            shutil.rmtree(other, ignore_errors=True)
    if description is None and not any(folder.iterdir()):
        folder.rmdir()
