"""A learned vector per position (Vaswani et al. 2017, Table 3 row E; GPT-2)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.errors import UserError
from tx_jax.options import check_number
from tx_jax.positions import _base


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """A table with a row per position, added to the embedding.

    A position outside the table is never clamped: where positions are known while tracing, or the
    input is longer than the table, it is a UserError; inside a compiled program its embedding is
    NaN, which the training loop stops at.

    Attributes:
      length: rows of the table; 0 = the context the model is built for.
      init_std: standard deviation of the rows at the start.
    """

    length: int = 0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_number(self, "length", low=0, whole=True)
        check_number(self, "init_std", low=0)

    @property
    def max_length(self) -> int | None:
        return self.length or None

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        shape = (self.length or sizes["T"], sizes["D"])
        return {"table_TD": self.init_std * jax.random.normal(key, shape, jnp.float32)}

    def embed(self, params: _base.Params, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        _base.check_positions(pos_BT, x_BTD.shape[:2])
        table_TD = params["table_TD"]
        rows = table_TD.shape[0]
        if isinstance(pos_BT, jax.core.Tracer):
            if x_BTD.shape[1] > rows:
                raise UserError(f"the input has {x_BTD.shape[1]} tokens but the learned position "
                                f"table has {rows} rows; shorten the input or build the model "
                                "with a longer context.")
        elif pos_BT.size and not 0 <= np.min(pos_BT) <= np.max(pos_BT) < rows:
            raise UserError(f"positions {np.min(pos_BT)} to {np.max(pos_BT)} leave the learned "
                            f"position table of {rows} rows; padding takes position 0.")
        known = (pos_BT >= 0) & (pos_BT < rows)
        found_BTD = table_TD[jnp.where(known, pos_BT, 0)]
        return x_BTD + jnp.where(known[..., None], found_BTD, jnp.nan).astype(x_BTD.dtype)
