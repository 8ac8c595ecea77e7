"""Biases that are functions of positions: evaluated where they are needed, never stored whole."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tx_jax.errors import UserError
from tx_jax.masks import index_arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bias:
    """A bias on the logits as a function, with parameters that get gradients.

    Attributes:
      function: static. Kind "pair": (params, head, q_pos, k_pos) -> bias, elementwise over the
        broadcast of integer arrays of rank 4, so that any tile can be computed alone (ALiBi, T5,
        KERPLE, FIRE). Kind "rows": (params, q_BTNH, logits_BNTS) -> bias [B, N, T, S], from the
        logits after scale and softcap, minus infinity where the mask forbids (CoPE). Whatever gets
        gradients has to come through `params`, not from the surroundings of the function.
      params: pytree of arrays.
      q_pos_BT, k_pos_BS: integer positions, [B, T] or [1, T]; default: the absolute indices. Give
        them where positions are not indices: left padding, packed documents.
      kind: "pair" or "rows".
    """

    function: Callable[..., jax.Array] = field(metadata={"static": True})
    params: Any = None
    q_pos_BT: jax.Array | None = None
    k_pos_BS: jax.Array | None = None
    kind: str = field(default="pair", metadata={"static": True})

    def check(self, B: int, N: int, T: int, S: int) -> None:
        """Raise UserError unless the positions fit the call and the function gives a bias."""
        if self.kind not in ("pair", "rows") or not callable(self.function):
            raise UserError(f"Bias({self.function!r}, kind={self.kind!r}) needs a function and the "
                            "kind 'pair' or 'rows'.")
        for name, length in (("q_pos_BT", T), ("k_pos_BS", S)):
            array = getattr(self, name)
            if array is None:
                continue
            if not isinstance(array, (jax.Array, np.ndarray)):
                raise UserError(f"{name} of the bias is a {type(array).__name__}; give an integer "
                                f"array ({B}, {length}) or (1, {length}).")
            if (not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 2
                    or array.shape[0] not in (1, B) or array.shape[1] != length):
                raise UserError(f"{name} of the bias has shape {tuple(array.shape)} and dtype "
                                f"{array.dtype}; give integers ({B}, {length}) or (1, {length}).")
        if self.kind == "pair":
            self._check_function(1, N, T, S)

    def _check_function(self, B: int, N: int, T: int, S: int) -> None:
        index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in
                 ((1, N, 1, 1), (1, 1, T, 1), (1, 1, 1, S))]
        try:
            out = jax.eval_shape(self.function, self.params, *index)
        except (TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise UserError("a bias function takes (params, head, q_pos, k_pos), arrays of rank 4 "
                            f"that broadcast, and gives an array; it failed with: {reason}"
                            ) from None
        shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
        fits = shape is not None and len(shape) == 4 and all(
            a in (1, b) for a, b in zip(shape, (B, N, T, S), strict=True))
        if not fits or not jnp.issubdtype(dtype, jnp.floating):
            raise UserError(f"a bias function gave {dtype or type(out).__name__} {shape or ''} for "
                            f"heads, queries and keys of ({B}, {N}, {T}, {S}); it must give "
                            "floating-point numbers that broadcast to that.")


@dataclass(frozen=True)
class _Split:
    """A pair bias whose parameters come in two lists: floating-point ones, and the others."""

    function: Callable[..., jax.Array]
    tree: Any
    floats: tuple[bool, ...]

    def __call__(self, learned: list, rest: list, head: jax.Array, q_pos: jax.Array,
                 k_pos: jax.Array) -> jax.Array:
        parts = {True: iter(learned), False: iter(rest)}
        params = self.tree.unflatten([next(parts[is_float]) for is_float in self.floats])
        return evaluate(self.function, params, head, q_pos, k_pos)


def split_bias(bias: Bias) -> tuple[_Split, list, list]:
    """A hashable function of a pair bias, the parameters that get gradients, and the others."""
    leaves, tree = jax.tree.flatten(bias.params)
    leaves = [jnp.asarray(x) for x in leaves]
    floats = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
    learned, rest = ([x for x, is_float in zip(leaves, floats, strict=True) if is_float == kind]
                     for kind in (True, False))
    return _Split(bias.function, tree, floats), learned, rest


def evaluate(function: Callable[..., jax.Array], params: Any, head: jax.Array, q_pos: jax.Array,
             k_pos: jax.Array) -> jax.Array:
    """A pair bias on a tile, of the full shape whichever arguments the function reads."""
    shape = jnp.broadcast_shapes(head.shape, q_pos.shape, k_pos.shape)
    return jnp.broadcast_to(function(params, head, q_pos, k_pos), shape)


def bias_positions(bias: Bias, T: int, S: int, q_start: ArrayLike | None
                   ) -> tuple[jax.Array, jax.Array]:
    """Positions of queries [1|B, T] and keys [1|B, S] that a pair bias is evaluated at."""
    q_idx, k_idx = index_arrays(T, S, q_start)
    return (q_idx[:, :, 0] if bias.q_pos_BT is None else bias.q_pos_BT,
            k_idx[:, 0, :] if bias.k_pos_BS is None else bias.k_pos_BS)


def dense_bias(bias: Bias, N: int, T: int, S: int, q_start: ArrayLike | None) -> jax.Array:
    """A pair bias as an array [1|B, N, T, S]: what it means, in O(N T S) memory."""
    q_pos, k_pos = bias_positions(bias, T, S, q_start)
    return evaluate(bias.function, bias.params, jnp.arange(N)[None, :, None, None],
                    q_pos[:, None, :, None], k_pos[:, None, None, :])
