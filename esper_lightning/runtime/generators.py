"""The global random generators of Python, numpy and torch, from which a user's code may draw."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng


@contextmanager
def seeded_generators(rng_seed: int) -> Iterator[None]:
    """Within this context the global generators begin with a seed; then they continue as before it."""
    with isolate_rng():
        random.seed(rng_seed)
        np.random.seed(rng_seed)
        torch.manual_seed(rng_seed)
        yield
