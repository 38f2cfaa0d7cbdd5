"""Sequences cut where the recurrent state is reset: an LSTM runs all stretches side by side, however they lie."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Stretches(NamedTuple):
    """How T steps of N environments fall into S stretches, the longest first. A place is env · T + step."""

    places: Tensor  # [N·T] in the order of a PackedSequence: first steps of all stretches, then second steps …
    back: Tensor  # [N·T] its inverse
    sizes: Tensor  # [longest] on the CPU: stretches that have a first, a second … step
    first: Tensor  # [N] the stretch in which each environment begins
    last: Tensor  # [N] and ends

    def pack(self, x: Tensor) -> PackedSequence:  # [T, N, W]
        """The stretches of `x`."""
        return PackedSequence(x.transpose(0, 1).flatten(0, 1)[self.places], self.sizes)

    def unpack(self, data: Tensor) -> Tensor:  # [N·T, W] -> [T, N, W]
        """Undoes `pack`, given the data of what became of it."""
        envs = len(self.first)
        return data[self.back].unflatten(0, (envs, len(data) // envs)).transpose(0, 1)

    def begin_with(self, state: Tensor) -> Tensor:  # [N, W] -> [S, W]
        """Where an environment begins it has its state; after a reset there is none."""
        return state.new_zeros(int(self.sizes[0]), state.shape[-1]).index_copy(0, self.first, state)


def stretches(starts: Tensor) -> Stretches:
    """Cuts at the resets `starts` [T, N], each before its step; one before the first step cuts nothing."""
    steps, envs = starts.shape
    cut = starts.T.clone()  # [N, T]
    cut[:, 0] = True
    begins = cut.flatten().nonzero().squeeze(1)  # [S] places
    lengths = torch.diff(begins, append=begins.new_tensor([envs * steps]))
    lengths, order = lengths.sort(descending=True, stable=True)
    rank = order.argsort()
    step = torch.arange(int(lengths[0]), device=starts.device)[:, None]
    there = step < lengths  # [longest, S]
    places = (begins[order] + step)[there]
    number = cut.flatten().cumsum(0) - 1  # the stretch that each place lies in, before they were sorted
    ends = torch.arange(envs, device=starts.device) * steps
    return Stretches(places, places.argsort(), there.sum(1).cpu(), rank[number[ends]], rank[number[ends + steps - 1]])
