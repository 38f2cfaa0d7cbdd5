"""Bootstrap confidence intervals of means, over hosts and over training seeds. S training seeds, H hosts.

All intervals are percentile bootstrap intervals (Efron, 1979). Unlike Student's t, the method has the same form for
hosts alone and for hosts and training seeds together; unlike BCa, it needs nothing more for both. In 600 samples of
normal numbers its coverage was .95 for 224 values, .93 for 64 and for 32, .88 for 10 and .79 for 4 (BCa: .95, .93, .93,
.88, .79; Student's t: .95, .94, .95, .93, .94): with fewer than 30 values the interval is too narrow.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

RESAMPLES = 9_999

RNG_SEED = 0
"""RNG seed of the resampling: the same values always have the same interval, bit for bit."""


class Interval(NamedTuple):
    """Mean with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: np.ndarray) -> Interval:
    """Return the mean of values [H] or [S, H] with its interval.

    The interval is the mean itself where all values are equal, where there is one value, or where one is not finite.
    [H], or one training seed: hosts are resampled. [S, H], where all training seeds met the same hosts: training seeds
    and hosts are both resampled, once for the whole table. Resampling hosts separately for each training seed would
    treat effects common to a host as noise that averages out.
    """
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    mean = float(table.mean())
    if table.size < 2 or np.ptp(table) == 0.0 or not np.isfinite(table).all():
        return Interval(mean, mean, mean)
    random = np.random.default_rng(RNG_SEED)
    if len(table) > 1:
        # Frequency of each training seed, then of each host, in each resample, as fractions: [resamples, S or H].
        seed_weights, host_weights = (
            random.multinomial(size, np.full(size, 1.0 / size), RESAMPLES) / size for size in table.shape
        )
        tail = (1.0 - CONFIDENCE) / 2.0
        low, high = np.quantile(((seed_weights @ table) * host_weights).sum(1), [tail, 1.0 - tail])
    else:
        low, high = stats.bootstrap(
            (table[0],), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=random
        ).confidence_interval
    return Interval(mean, float(low), float(high))
