"""Which attention implementation runs given shapes: the name that ledger rows record."""

from dataclasses import replace
from typing import Any

import jax

from tx_jax.attention import request_of, resolve


def kernel_name(attention: str, q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, *,
                traced_scale: bool = False, **options: Any) -> str:
    """The implementation that `attend` takes for these arguments, of which shapes will do.

    Args:
      attention: as in `--model.attention`.
      traced_scale: the scale is traced; `options["scale"]` may then be any number, where an array
        would start the devices.

    Raises:
      UserError: none can do it.
    """
    request = request_of(q_BTNH, k_BSKH, v_BSKH, **options)
    return resolve(attention, replace(request, traced_scale=traced_scale))[0]


def shape(*sizes: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """The shape of an array that is never made."""
    return jax.ShapeDtypeStruct(sizes, dtype)
