"""Modules that describe themselves in their state dict, so that it determines the whole network and not its weights
alone.

The description is JSON in a tensor of bytes, because every file format for weights holds tensors: `torch.save` with
`weights_only`, safetensors, checkpoints of Lightning.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

RECORD = "record"
"""Last part of the name of a record in a state dict."""

MAX_RECORD_BYTES = 2**20

HANDLE = "_record_check"
"""Attribute of a network for the handle of its hook `prepare_load`."""


class Recorded(nn.Module):
    """Module with a record in its state dict, next to its weights, as long as it has something to record."""

    def record(self) -> Any | None:
        """Return what grew in the module, in plain JSON types; None if nothing did."""
        raise NotImplementedError

    def check_record(self, record: Any, saved: dict[str, Any]) -> None:
        """Raise ValueError unless the module can become what the record describes, with `saved` as its state dict."""
        raise NotImplementedError

    def restore_record(self, record: Any) -> None:
        """Become what a record describes that was checked; the weights are loaded afterwards."""
        raise NotImplementedError

    def forget(self) -> None:
        """Become as it was made."""
        raise NotImplementedError

    def read_record(self, state: Mapping[str, Any], prefix: str) -> Any | None:
        """Return the record in a state dict in which the module's names begin with `prefix`; None if there is none.

        Raises ValueError, and changes nothing, if the record is damaged or does not fit the module or its weights.
        """
        if prefix + RECORD not in state:
            return None
        record = decode_record(state[prefix + RECORD])
        saved = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        del saved[RECORD]
        self.check_record(record, saved)
        return record

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (record := self.record()) is not None:
            destination[prefix + RECORD] = encode_record(record)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Before the submodules, which are those that the record describes, get their weights.
        if (record := self.read_record(state_dict, prefix)) is not None:
            self.restore_record(record)
        elif self.record() is not None:
            missing_keys.append(prefix + RECORD)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + RECORD in unexpected_keys:
            unexpected_keys.remove(prefix + RECORD)


def encode_record(record: Any) -> Tensor:  # uint8 [bytes]
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)


def decode_record(saved: Any) -> Any:
    """Return the JSON value in a tensor that `encode_record` made, or raise ValueError."""
    if not isinstance(saved, Tensor) or saved.dtype is not torch.uint8 or saved.ndim != 1:
        raise ValueError("a record of what grew in the network is no row of bytes; the state dict is damaged")
    if len(saved) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of what grew in the network has {len(saved)} bytes; {MAX_RECORD_BYTES} are allowed")
    try:
        return json.loads(bytes(saved.tolist()))
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise ValueError(
            f"a record of what grew in the network is no JSON; the state dict is damaged: {reprlib.repr(str(error))}"
        ) from None


def recorded_modules(network: nn.Module) -> Iterator[tuple[str, Recorded]]:
    """Yield every module with a record and the prefix of its names; a shared module under each of its names."""
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, Recorded):
            yield f"{name}." if name else "", module


def weights_of(network: nn.Module) -> dict[str, Any]:
    """Return the state dict of a network without its records."""
    records = {prefix + RECORD for prefix, _ in recorded_modules(network)}
    return {name: value for name, value in network.state_dict().items() if name not in records}


def with_records_of(network: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights` with the records of a network, so that they are loaded into what the network consists of."""
    records = {
        prefix + RECORD: encode_record(record)
        for prefix, module in recorded_modules(network)
        if (record := module.record()) is not None
    }
    return {**weights, **records}


def prepare_load(network: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Check all records of a state dict before any of it is loaded; empty what grew after it was saved.

    A hook for `register_load_state_dict_pre_hook`. Modules without a record in a state dict with all weights of the
    network proper were as made when it was saved. A state dict that lacks weights is a part of one, and says nothing
    of modules that it does not name.

    Raises ValueError, and changes nothing, if a record does not fit.
    """
    modules = list(recorded_modules(network))
    for module_prefix, module in modules:
        module.read_record(state, prefix + module_prefix)
    prefixes = tuple(module_prefix for module_prefix, _ in modules)
    if all(prefix + name in state for name in network.state_dict() if not name.startswith(prefixes)):
        for module_prefix, module in modules:
            if module.record() is not None and not any(name.startswith(prefix + module_prefix) for name in state):
                module.forget()


def check_before_loading(network: nn.Module) -> None:
    """Make `network.load_state_dict` check all records first, so that it is refused as a whole; see `prepare_load`."""
    if HANDLE not in vars(network):
        vars(network)[HANDLE] = network.register_load_state_dict_pre_hook(prepare_load)


def stop_checking(network: nn.Module) -> None:
    """Undo `check_before_loading`."""
    vars(network).pop(HANDLE).remove()
