"""Training data that do not fit into memory: hosts are trained on one chunk of them per host epoch."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from esper_lightning.runtime.generators import seeded_generators
from esper_lightning.tasks.task import Split


class Stream:
    """Training data that a loader reads chunk by chunk, one for each host epoch of all hosts of a pool.

    An episode begins a pass through the loader, and further passes follow where one does not suffice. A chunk depends
    on the RNG seed of the episode and on the tick alone, as do random transforms that draw from the global generators
    of torch, numpy or Python. Workers of the loader read ahead while hosts train; without workers hosts wait.

    Args:
        loader: Batches of one pass, such as a DataLoader.
        gather: Function that makes a split of some batches.
    """

    def __init__(self, loader: Iterable[Any], gather: Callable[[Sequence[Any]], Split]) -> None:
        if getattr(loader, "persistent_workers", False):
            raise ValueError(
                "a stream: persistent workers do not begin a pass with new random numbers, so that a run could not be "
                "resumed; leave persistent_workers of the training loader off"
            )
        self.loader, self.gather = loader, gather
        self._rewind(0)

    def _rewind(self, rng_seed: int) -> None:
        self._rng_seed, self._tick, self._batches = rng_seed, 0, passes(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: it begins its passes anew."""
        return {"loader": self.loader, "gather": self.gather}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def chunk(self, rng_seed: int, tick: int, samples: int) -> Split:
        """Return the chunk of a tick (counted from 0) in an episode: whole batches, at least so many samples.

        To resume in the middle of an episode, the chunks before it are read again and dropped.
        """
        if rng_seed != self._rng_seed or tick < self._tick:
            self._rewind(rng_seed)
        batches: list[Any] = []
        while self._tick <= tick:
            with seeded_generators(zlib.crc32(f"chunk {rng_seed} {self._tick}".encode())):
                batches, missing = [], samples
                while missing > 0:
                    batches.append(next(self._batches))
                    missing -= self.gather(batches[-1:]).samples
            self._tick += 1
        return self.gather(batches)


def passes(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the batches of endless passes. Raises ValueError if a pass has none.

    As a method it would refer to its stream, whose removal would later wait five seconds for each worker of the loader.
    """
    while True:
        for part in (loader, getattr(loader, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(int(torch.randint(2**62, ())))
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("a stream: the training loader has no batches; give it data")
