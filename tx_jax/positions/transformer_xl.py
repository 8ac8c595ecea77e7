"""Relative positions of Transformer-XL (Dai et al. 2019, section 3.3) as a wider dot product."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide
from tx_jax.options import check_number
from tx_jax.positions import _base
from tx_jax.positions._angles import angles, frequencies
from tx_jax.positions._rope import turn


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits are (q_i + u) . k_j + (q_i + v) . W R(i - j), with R the sinusoids of `sinusoidal`.

    With w = W^T (q_i + v), the second term is a sum of w_s sin((i - j) f) + w_c cos((i - j) f)
    over frequencies f. By the addition theorem this is the dot product of the pair (w_c, -w_s)
    turned by i f and of the pair (1, 0) turned by j f, which is (cos j f, sin j f). So queries and
    keys are widened from H to H + P columns (P + 1 if P is odd) and any implementation of
    attention that takes such heads computes the scheme; the scale stays that of H. In bfloat16
    the sines and cosines are rounded to 8 bits.

    Attributes:
      width: P, the columns of R; 0 = the width of the model as in the paper.
      base: of the frequencies.
    """

    per_layer = True
    late = True
    width: int = 0
    base: float = 10000.0

    def __post_init__(self) -> None:
        check_number(self, "width", low=0, whole=True)
        check_number(self, "base", above=0)

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        P, N, H = self.width or sizes["D"], sizes["N"], sizes["H"]
        return {"r_PNH": P ** -0.5 * jax.random.normal(key, (P, N, H), jnp.float32),
                "bias_u_NH": jnp.zeros((N, H), jnp.float32),
                "bias_v_NH": jnp.zeros((N, H), jnp.float32)}

    def rotate_q(self, params: _base.Params, q_BTNH: jax.Array, pos_BT: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        """[B, T, N, H + P], in the dtype of the queries."""
        _base.check_positions(pos_BT, q_BTNH.shape[:2])
        q = q_BTNH.astype(wide(q_BTNH.dtype))
        u_NH, v_NH, r_PNH = (params[name].astype(q.dtype) for name in
                             ("bias_u_NH", "bias_v_NH", "r_PNH"))
        w_BTNP = jnp.einsum("BTNH,PNH->BTNP", q + v_NH[None, None], r_PNH)
        if r_PNH.shape[0] % 2:  # the lone sine of an odd width gets a cosine of weight 0
            w_BTNP = jnp.pad(w_BTNP, ((0, 0),) * 3 + ((0, 1),))
        pair_BTNP = jnp.concatenate([w_BTNP[..., 1::2], -w_BTNP[..., 0::2]], axis=-1)
        turned_BTNP = turn(pair_BTNP, self._angles(params, pos_BT, q.dtype), "half")
        wider = jnp.concatenate([q + u_NH[None, None], turned_BTNP], axis=-1)
        return wider.astype(q_BTNH.dtype)

    def rotate_k(self, params: _base.Params, k_BSKH: jax.Array, pos_BS: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        """[B, S, K, H + P], in the dtype of the keys."""
        _base.check_positions(pos_BS, k_BSKH.shape[:2])
        angle_BS1F = self._angles(params, pos_BS, wide(k_BSKH.dtype))
        unit_BS1P = jnp.concatenate([jnp.cos(angle_BS1F), jnp.sin(angle_BS1F)], axis=-1)
        unit_BSKP = jnp.broadcast_to(unit_BS1P, (*k_BSKH.shape[:3], unit_BS1P.shape[-1]))
        return jnp.concatenate([k_BSKH, unit_BSKP.astype(k_BSKH.dtype)], axis=-1)

    def _angles(self, params: _base.Params, pos_BT: jax.Array, dtype) -> jax.Array:
        frequency_F = frequencies(self.base, params["r_PNH"].shape[0])
        return angles(pos_BT, frequency_F, dtype)[:, :, None, :]
