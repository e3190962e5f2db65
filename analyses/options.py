"""Options that a caller gives: what does not fit is refused by name, whatever its type, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.analyses.prompts import MAX_SEED
from workbench.kernels.masks import is_whole as is_whole

MOST = 1_000_000  # of whatever is drawn, listed or repeated: more is a slip of the hand


def check_whole(*, least: int = 1, most: int = MOST, **options: Any) -> None:
    """Refuses whichever of the options is no whole number from ``least`` to ``most``.

    Raises:
        ValueError: naming it.
    """
    for name, value in options.items():
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be at least {least} and whole, got {value!r}")
        if value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value!r}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Refuses an option that is none of those known. Raises ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_position(position: Any, n: int) -> None:
    """Refuses a position that a text of ``n`` tokens has not; negative ones count from the end. Raises ValueError."""
    if not is_whole(position) or not -n <= position < n:
        raise ValueError(f"position must lie between {-n} and {n - 1}, got {position!r}")


def check_seed(seed: Any) -> None:
    """Refuses a seed that random generators do not take. Raises ValueError."""
    if not is_whole(seed) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")


def check_share(*, with_one: bool = False, **options: Any) -> None:
    """Refuses whichever of the options is no number between 0 and 1, of which 1 counts with ``with_one``.

    Raises:
        ValueError: naming it.
    """
    for name, value in options.items():
        if not is_number(value) or not (0 < value < 1 or (with_one and value == 1)):
            raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether it is a number other than NaN and infinity; True and False are none here."""
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_real and bool(np.isfinite(float(value))) if is_real and abs(value) < 1e300 else False
