"""Segments of sequences between resets of the recurrent state, packed so that an LSTM processes them in parallel."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Segments(NamedTuple):
    """Split of T steps of N environments into S segments, longest first. Positions count env * T + step."""

    positions: (
        Tensor  # [N·T] positions in the order of a PackedSequence: first steps of all segments, then second steps …
    )
    inverse: Tensor  # [N·T] inverse permutation
    sizes: Tensor  # [longest] on the CPU: number of segments that have a first, a second … step
    first: Tensor  # [N] first segment of each environment
    last: Tensor  # [N] last segment of each environment

    def pack(self, x: Tensor) -> PackedSequence:  # [T, N, W]
        """Return the segments of `x` as a PackedSequence."""
        return PackedSequence(x.transpose(0, 1).flatten(0, 1)[self.positions], self.sizes)

    def unpack(self, data: Tensor) -> Tensor:  # [N·T, W] -> [T, N, W]
        """Return packed data in the original order; the inverse of `pack`."""
        envs = len(self.first)
        return data[self.inverse].unflatten(0, (envs, len(data) // envs)).transpose(0, 1)

    def initial_states(self, state: Tensor) -> Tensor:  # [N, W] -> [S, W]
        """Return initial states of all segments: `state` for the first of each environment, zero after a reset."""
        return state.new_zeros(int(self.sizes[0]), state.shape[-1]).index_copy(0, self.first, state)


def split_segments(starts: Tensor) -> Segments:
    """Split N sequences of T steps at the resets `starts` [T, N].

    `starts[t, n]` is True if environment n was reset before step t. A segment begins at step 0 in any case.
    """
    steps, envs = starts.shape
    cut = starts.T.clone()  # [N, T]
    cut[:, 0] = True
    segment_starts = cut.flatten().nonzero().squeeze(1)  # [S] positions
    lengths = torch.diff(segment_starts, append=segment_starts.new_tensor([envs * steps]))
    lengths, order = lengths.sort(descending=True, stable=True)
    rank = order.argsort()
    step = torch.arange(int(lengths[0]), device=starts.device)[:, None]
    is_inside = step < lengths  # [longest, S]
    positions = (segment_starts[order] + step)[is_inside]
    segment_index = cut.flatten().cumsum(0) - 1  # segment of each position, before sorting by length
    ends = torch.arange(envs, device=starts.device) * steps
    return Segments(
        positions,
        positions.argsort(),
        is_inside.sum(1).cpu(),
        rank[segment_index[ends]],
        rank[segment_index[ends + steps - 1]],
    )
