"""FLOPs of a host's forward pass: those of the host are counted in a run, those of its seeds computed by formulas."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

from esper_lightning.growth.blueprints import get_blueprint
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.runtime.nested import (
    BATCH_LENGTH_ERRORS,
    ExampleInput,
    call_network,
    first_tensor_path,
    get_at,
    iter_tensors,
    repeat_rows,
)

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    getattr(torch.ops.aten, name): formula
    for name, formula in {
        FUSED: lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape),
        # Two products for each of the forward pass; that which the kernel computes anew is not counted.
        f"{FUSED}_backward": lambda _, query, key, value, *__, **___: (
            2 * sdpa_flop_count(query.shape, key.shape, value.shape)
        ),
    }.items()
    if hasattr(torch.ops.aten, name)  # another version of torch may lack one
}
"""FLOPs of operators: torch's table, and the fused attention of the CPU."""

CLASS_LOSSES = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
VALUE_LOSSES = {
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.huber_loss,
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.binary_cross_entropy_with_logits,
}
"""Operators of losses, whose second argument are the targets: indices of classes, or values."""

PASSES_PER_STEP = 3
"""Cost of a training step in forward passes: the forward pass and one backward pass each for inputs and weights.
Source: Kaplan et al., 2020, https://arxiv.org/abs/2001.08361."""


def positions_per_parameter(flops: float, parameters: int) -> float:
    """Return on how many positions (tokens) for each of its parameters a network is trained by so many FLOPs.

    A training step takes about six FLOPs per parameter and position (https://arxiv.org/abs/2001.08361).
    """
    return flops / (6.0 * parameters**2)


class HostFlops(NamedTuple):
    """FLOPs of the forward pass for one sample."""

    host: int  # with empty slots
    positions: dict[str, list[int]]
    """Number of positions (pixels or tokens) of the feature at each slot, one entry per pass."""
    behind: dict[str, int]
    """FLOPs of the host behind each slot that its forward pass reaches, in the order in which it reaches them."""
    blocks: Mapping[str, int] = MappingProxyType({})
    """FLOPs of one block of the list of each depth slot."""
    targets: int = 1
    """Number of outputs for one sample, each of which has a target: one for a class, one for each token of a text."""

    def seed_flops(self, slot: SeedSlot) -> int:
        """Return the FLOPs of the seed in `slot` for one sample; 0 for an empty slot."""
        if not slot.occupied:
            return 0
        assert slot.blueprint is not None, "the seed's"
        if isinstance(slot, DepthSlot):
            return slot.added * self.blocks[slot.name]
        flops_of_pass = get_blueprint(slot.blueprint, slot.layout).flops
        return sum(flops_of_pass(slot.width, n_positions) for n_positions in self.positions[slot.name])

    def with_seeds(self, slots: Iterable[SeedSlot]) -> int:
        """Return the FLOPs of host and seeds for one sample."""
        return self.host + sum(map(self.seed_flops, slots))

    def of_step(self, slots: Iterable[SeedSlot]) -> int:
        """Return the FLOPs of a training step for one sample, of the host and of its seeds."""
        return PASSES_PER_STEP * self.with_seeds(slots)


class FlopCounter(TorchDispatchMode):
    """Context that counts FLOPs by torch's formulas.

    Unlike torch's FlopCounterMode it knows the fused attention of the CPU, and puts no hooks on modules and gradients,
    which a derivative within a forward pass, or in a loss, does not survive.
    """

    supports_higher_order_operators = True
    total = 0
    """FLOPs so far."""

    def __init__(self) -> None:
        super().__init__()
        # Targets of torch's losses so far with their numbers. Tensors are held, as another one could take their memory.
        self._labels: list[tuple[Tensor, int]] = []
        self._values: list[tuple[Tensor, int]] = []

    @property
    def targets(self) -> int:
        """Number of the targets of losses: labels that no loss ignores, else rows of values, such as one-hot classes.

        Losses of the same labels, such as one that is logged beside one that is trained, count once.
        """
        return sum({(x.data_ptr(), x.shape): number for x, number in self._labels or self._values}.values())

    final_backward = False
    """True during a step's own backward pass, in which nothing is counted that checkpointed parts compute again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = getattr(func, "_overloadpacket", None)
        formula = FORMULAS.get(operator)
        if formula is None and hasattr(func, "decompose"):
            with self:  # inference mode hands on operators that consist of others
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        output = func(*args, **(kwargs or {}))
        # Only what is computed again records its graph within that pass.
        if self.final_backward and torch.is_grad_enabled():
            return output
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=output)
        if operator in CLASS_LOSSES:
            _, classes, _, _, ignored = args
            self._labels.append((classes, int((classes != ignored).sum())))
        elif operator in VALUE_LOSSES:
            self._values.append((args[1], args[1].shape[:-1].numel() if args[1].ndim > 1 else args[1].numel()))
        return output


def measure_flops(host: nn.Module, sample: ExampleInput) -> HostFlops:
    """Count the FLOPs of a host with empty slots on one sample [1, …]; sets the host to evaluation mode."""
    try:
        return count_flops(host, lambda: call_network(host, sample))
    except BATCH_LENGTH_ERRORS:  # BatchNorm without running statistics, or squeeze(): they take two samples at least
        of_two = count_flops(host, lambda: call_network(host, repeat_rows(sample, 1, 2)))
        behind = {name: flops // 2 for name, flops in of_two.behind.items()}
        blocks, targets = {name: flops // 2 for name, flops in of_two.blocks.items()}, max(1, of_two.targets // 2)
        return HostFlops(of_two.host // 2, of_two.positions, behind, blocks=blocks, targets=targets)


@contextmanager
def plain_operators() -> Iterator[None]:
    """Compute attention, transformer and recurrent layers as matrix products, which FlopCounter counts."""
    mha, libraries = torch.backends.mha, (torch.backends.mkldnn, torch.backends.cudnn)
    had_fastpath, were_enabled = mha.get_fastpath_enabled(), [library.enabled for library in libraries]
    with sdpa_kernel(SDPBackend.MATH):
        mha.set_fastpath_enabled(False)
        # Their `flags` would also set the precision, and raise where the user has set it by the newer interface.
        for library in libraries:
            library.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            mha.set_fastpath_enabled(had_fastpath)
            for library, enabled in zip(libraries, were_enabled, strict=True):
                library.enabled = enabled  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def count_flops(host: nn.Module, run: Callable[[], Any]) -> HostFlops:
    """Count the FLOPs of `run`, a forward pass of a host with empty slots on one sample, in evaluation mode."""
    slots = slots_of(host).values()
    positions_by_slot: dict[str, list[int]] = {slot.name: [] for slot in slots}
    before: dict[str, int] = {}  # FLOPs of the host before each slot
    blocks: dict[str, int] = {}

    def record(slot: SeedSlot, x: Tensor) -> Tensor:
        """Note the positions of the feature at a slot, and the FLOPs before it; return the feature unchanged."""
        positions_by_slot[slot.name].append(x[0].numel() // slot.width)
        before.setdefault(slot.name, counter.total)
        return x

    def count_block(slot: DepthSlot) -> Iterator[RemovableHandle]:
        """Register hooks that count the first block of a list, and record the output of the last one."""
        first, last = slot.block_list.blocks[0], slot.block_list.blocks[-1]

        def begin(*_: Any) -> None:
            blocks[slot.name] = -counter.total

        def end(*_: Any) -> None:
            blocks[slot.name] += counter.total

        def end_list(_: nn.Module, __: Any, output: Any) -> None:
            record(slot, get_at(output, first_tensor_path(output) or ()))

        yield first.register_forward_pre_hook(begin)
        yield first.register_forward_hook(end)
        yield last.register_forward_hook(end_list)

    host.eval()
    hooks = [hook for slot in slots if isinstance(slot, DepthSlot) for hook in count_block(slot)]
    for slot in slots:  # a depth slot is never called, so hooks record it
        slot.override = record
    try:
        with plain_operators(), FlopCounter() as counter:
            outputs = [part for part in iter_tensors(run()) if part.is_floating_point() and part.ndim > 1]
    finally:
        for slot in slots:
            slot.override = None
        for hook in hooks:
            hook.remove()
    total = counter.total
    behind = {name: total - flops for name, flops in before.items()}
    targets = outputs[0].shape[:-1].numel() if outputs else 1  # classes come last
    return HostFlops(total, positions_by_slot, behind, blocks=blocks, targets=targets)
