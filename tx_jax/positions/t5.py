"""Relative position buckets (Raffel et al. 2020, T5, section 2.1)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.dtypes import wide
from tx_jax.errors import UserError
from tx_jax.options import check_number, check_switch
from tx_jax.positions import _base
from tx_jax.positions._pairs import relative


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits get a learned number for each head and each bucket of distances.

    Half of the buckets hold one distance each, the others grow as powers up to `max_distance`;
    the last holds whatever is further. Layers share the table. T5 itself has no 1/sqrt(d) on the
    logits (`--model.scale=none`).

    Attributes:
      buckets: number of buckets, even.
      max_distance: distances from here on share a bucket (those of the last one start earlier).
      bidirectional: half of the buckets for keys after the query; else these fall into bucket 0,
        for causal attention.
    """

    bias_kind = "pair"
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False

    def __post_init__(self) -> None:
        check_switch(self, "bidirectional")
        check_number(self, "buckets", low=4 if self.bidirectional else 2, high=2**20,
                     whole=True)
        check_number(self, "max_distance", low=1, high=2**20, whole=True)
        if self.buckets % 2:
            raise UserError(f"t5(buckets={self.buckets}) is odd; choose an even number.")
        if self.max_distance <= self.buckets // 2:
            raise UserError(f"t5(max_distance={self.max_distance}) must be above half the "
                            f"{self.buckets} buckets, which hold one distance each.")

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        std, shape = sizes["D"] ** -0.5, (self.buckets, sizes["N"])
        return {"bias_CN": std * jax.random.normal(key, shape, jnp.float32)}

    def pair_bias(self, params: _base.Params, head: jax.Array, q_pos: jax.Array, k_pos: jax.Array
                  ) -> jax.Array:
        found = params["bias_CN"][self.bucket(relative(q_pos, k_pos)), head]
        return found.astype(wide(found.dtype))

    def bucket(self, relative: jax.Array) -> jax.Array:
        """The bucket of key - query, int32 of the same shape."""
        side = self.buckets // 2 if self.bidirectional else self.buckets
        table = jnp.asarray(bucket_table(side, self.max_distance))
        if not self.bidirectional:
            return table[jnp.clip(-relative, 0, self.max_distance)]
        bucket = table[jnp.minimum(jnp.abs(relative), self.max_distance)]
        return jnp.where(relative > 0, bucket + side, bucket)


def bucket_table(buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of distance 0 .. max_distance, int32: b/2 + floor(b/2 ln(2n/b) / ln(2 max/b))
    where n >= b/2, else n."""
    exact = buckets // 2
    distance = np.arange(max_distance + 1)
    growth = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    # The tolerance keeps distances on a boundary, where the logarithm is whole, in their bucket.
    coarse = exact + np.floor((buckets - exact) * growth + 1e-9).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(coarse, buckets - 1)).astype(np.int32)
