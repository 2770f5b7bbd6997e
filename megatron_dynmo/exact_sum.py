"""An exact sum of non-negative float64 numbers that does not depend on order or grouping.

Tier: pure. A sum is held as a fixed-point number wide enough for every float64, cut into limbs of
32 bits that are kept in int64. Integer addition is associative, so limbs made by different ranks
may be added in any order, by any reduction algorithm, and the result is the same bit for bit.

Format: `limbs[i]`, i < 66, weighs 2 ** (32 * i - 1074); limb 66 counts infinities, limb 67 counts
NaNs. The limbs that `limbs` returns are below 2**32 (but for the highest, below 2**43), so fewer
than 2**20 of them can be added before an int64 overflows.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

# Bit 0 has the weight of the smallest subnormal, 2**-1074; the largest float64 ends at bit 2097.
_UNIT = 1074
_LIMB_BITS = 32
_NUM_FINITE = 66
_INFINITIES = 66
_NANS = 67
NUM_LIMBS = 68
# How many numbers one call of `limbs` takes, so that the highest limb stays below 2**43.
MAX_VALUES = 1 << 24

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(_LIMB_BITS)

Limbs = npt.NDArray[np.int64]


def limbs(values: npt.ArrayLike | Iterable[float]) -> Limbs:
    """Return the exact sum of `values` as limbs.

    Args:
        values: Non-negative float64 numbers, any shape, at most `MAX_VALUES`; subnormal numbers,
            infinities and NaNs are allowed.

    Returns:
        int64 `[NUM_LIMBS]`, a new array. Arrays of different ranks are summed by adding them.

    Raises:
        ValueError: A value is negative, or there are too many.
    """
    array = np.atleast_1d(np.asarray(values, dtype=np.float64)).ravel()
    if array.size > MAX_VALUES:
        raise ValueError(f"{array.size} values in one call, at most {MAX_VALUES}: add the limbs")
    if (array < 0).any():
        raise ValueError(f"negative value {array[array < 0][0]!r}: the sum takes none")
    total = np.zeros(NUM_LIMBS, dtype=np.int64)
    total[_INFINITIES] = np.isposinf(array).sum()
    total[_NANS] = np.isnan(array).sum()

    bits = np.abs(array[np.isfinite(array)]).view(np.uint64)
    exponent = bits >> np.uint64(52)
    mantissa = bits & np.uint64((1 << 52) - 1)
    # Subnormal numbers have no hidden bit and share the exponent of the smallest normal ones.
    mantissa |= (exponent > 0).astype(np.uint64) << np.uint64(52)
    position = np.maximum(exponent, np.uint64(1)) - np.uint64(1)
    shift = position % _32
    low = (mantissa & _LOW) << shift
    high = (mantissa >> _32) << shift
    index = (position // _32).astype(np.intp)
    np.add.at(total, index, (low & _LOW).astype(np.int64))
    np.add.at(total, index + 1, ((low >> _32) + (high & _LOW)).astype(np.int64))
    np.add.at(total, index + 2, (high >> _32).astype(np.int64))
    return _carry(total)


def to_float(total: Limbs) -> float:
    """Return the sum that limbs hold, rounded once, to nearest, ties to even.

    Args:
        total: int64 `[NUM_LIMBS]`: what `limbs` returned, or a sum of such arrays.

    Returns:
        NaN if a NaN was added, else inf if an infinity was added or the sum is beyond float64.
    """
    if total[_NANS]:
        return float("nan")
    if total[_INFINITIES]:
        return float("inf")
    whole = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(total[:_NUM_FINITE]))
    try:
        # Division of Python integers is correctly rounded, subnormal results included.
        return whole / (1 << _UNIT)
    except OverflowError:
        return float("inf")


def _carry(total: Limbs) -> Limbs:
    """Move what exceeds 32 bits into the next limb; the highest keeps its excess."""
    for i in range(_NUM_FINITE - 1):
        total[i + 1] += total[i] >> _LIMB_BITS
        total[i] &= 0xFFFFFFFF
    return total
