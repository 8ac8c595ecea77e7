"""Checks of the options of a scheme: each error is one sentence that names scheme and option."""

import sys
from collections.abc import Iterable
from typing import Any

from tx_jax.errors import UserError, nearest


def scheme(encoding: Any) -> str:
    """The name of a scheme is that of its file."""
    return type(encoding).__module__.rsplit(".", 1)[-1]


def check_number(encoding: Any, option: str, *, low: float | None = None,
                 above: float | None = None, whole: bool = False) -> None:
    """Raise UserError unless the option is a finite number (no bool) within its bounds.

    Args:
      low: the smallest allowed value. above: a bound that is not itself allowed.
      whole: only integers will do.
    """
    value = getattr(encoding, option)
    bound = f" above {above}" if above is not None else f" of at least {low}" * (low is not None)
    if not (is_number(value) and (isinstance(value, int) or not whole)
            and (low is None or value >= low) and (above is None or value > above)):
        raise UserError(f"{scheme(encoding)}({option}={value!r}) must be a "
                        f"{'whole' if whole else 'finite'} number{bound}.")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False are not numbers."""
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and -sys.float_info.max <= value <= sys.float_info.max)


def check_choice(encoding: Any, option: str, choices: Iterable[str]) -> None:
    """Raise UserError unless the option is one of the choices."""
    value = getattr(encoding, option)
    if value not in tuple(choices):
        raise UserError(f"{scheme(encoding)}({option}={value!r}) is unknown"
                        f"{nearest(str(value), choices)}")


def check_switch(encoding: Any, option: str) -> None:
    """Raise UserError unless the option is True or False."""
    value = getattr(encoding, option)
    if not isinstance(value, bool):
        raise UserError(f"{scheme(encoding)}({option}={value!r}) must be True or False.")
