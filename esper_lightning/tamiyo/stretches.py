"""Segments of sequences between resets of the recurrent state, packed so that an LSTM processes them in parallel."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Stretches(NamedTuple):
    """Split of T steps of N environments into S segments, longest first. Positions count env * T + step."""

    places: Tensor  # [N·T] positions in the order of a PackedSequence: first steps of all segments, then second steps …
    back: Tensor  # [N·T] inverse permutation
    sizes: Tensor  # [longest] on the CPU: number of segments that have a first, a second … step
    first: Tensor  # [N] first segment of each environment
    last: Tensor  # [N] last segment of each environment

    def pack(self, x: Tensor) -> PackedSequence:  # [T, N, W]
        """Return the segments of `x` as a PackedSequence."""
        return PackedSequence(x.transpose(0, 1).flatten(0, 1)[self.places], self.sizes)

    def unpack(self, data: Tensor) -> Tensor:  # [N·T, W] -> [T, N, W]
        """Return packed data in the original order; the inverse of `pack`."""
        envs = len(self.first)
        return data[self.back].unflatten(0, (envs, len(data) // envs)).transpose(0, 1)

    def begin_with(self, state: Tensor) -> Tensor:  # [N, W] -> [S, W]
        """Return initial states of all segments: `state` for the first of each environment, zero after a reset."""
        return state.new_zeros(int(self.sizes[0]), state.shape[-1]).index_copy(0, self.first, state)


def stretches(starts: Tensor) -> Stretches:
    """Split sequences at the resets `starts` [T, N], each before its step; one before the first step has no effect."""
    steps, envs = starts.shape
    cut = starts.T.clone()  # [N, T]
    cut[:, 0] = True
    begins = cut.flatten().nonzero().squeeze(1)  # [S] positions
    lengths = torch.diff(begins, append=begins.new_tensor([envs * steps]))
    lengths, order = lengths.sort(descending=True, stable=True)
    rank = order.argsort()
    step = torch.arange(int(lengths[0]), device=starts.device)[:, None]
    there = step < lengths  # [longest, S]
    places = (begins[order] + step)[there]
    number = cut.flatten().cumsum(0) - 1  # segment of each position, before sorting by length
    ends = torch.arange(envs, device=starts.device) * steps
    return Stretches(places, places.argsort(), there.sum(1).cpu(), rank[number[ends]], rank[number[ends + steps - 1]])
