"""Checks of the options of a component: each error is one sentence that names both and the value.

A component is a dataclass in a file of its own, as in `tx_jax.positions`; its name is the file's.
"""

import sys
from collections.abc import Iterable
from typing import Any

from tx_jax.errors import UserError, nearest


def name_of(component: Any) -> str:
    """The name of a component is that of its file."""
    return type(component).__module__.rsplit(".", 1)[-1]


def check_number(component: Any, option: str, *, low: float | None = None,
                 above: float | None = None, high: float | None = None, whole: bool = False
                 ) -> None:
    """Raise UserError unless the option is a finite number (no bool) within its bounds.

    Args:
      low: the smallest allowed value. above: a bound that is not itself allowed.
      high: the largest allowed value.
      whole: only integers will do.
    """
    value = getattr(component, option)
    bounds = ([f"above {above}"] if above is not None else []) + (
        [f"of at least {low}"] if low is not None else []) + (
        [f"of at most {high}"] if high is not None else [])
    if not (is_number(value) and (isinstance(value, int) or not whole)
            and (low is None or value >= low) and (above is None or value > above)
            and (high is None or value <= high)):
        raise UserError(f"{name_of(component)}({option}={value!r}) must be a "
                        f"{'whole' if whole else 'finite'} number"
                        f"{' ' * bool(bounds)}{' and '.join(bounds)}.")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False are not numbers."""
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and -sys.float_info.max <= value <= sys.float_info.max)


def check_choice(component: Any, option: str, choices: Iterable[str]) -> None:
    """Raise UserError unless the option is one of the choices."""
    value = getattr(component, option)
    if value not in tuple(choices):
        raise UserError(f"{name_of(component)}({option}={value!r}) is unknown"
                        f"{nearest(str(value), choices)}")


def check_switch(component: Any, option: str) -> None:
    """Raise UserError unless the option is True or False."""
    value = getattr(component, option)
    if not isinstance(value, bool):
        raise UserError(f"{name_of(component)}({option}={value!r}) must be True or False.")
