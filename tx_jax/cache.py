"""The cache of keys and values: where a token goes, and what a query then sees.

Keys and values lie as [B, K, S, H], the places of a head together, so that a step reads them in one
sweep and writes one place; every layer has arrays of its own, so that nothing is copied. Under a
mask that shows the last W tokens only, the cache is a ring of W places. Otherwise an index is a
position, as the text of every row starts at place 0.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.masks import Full, Mask, Rule, parse_mask

FORMATS = ("model", "int8")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """Keys or values of one layer: x_BKSH in the dtype of the model, or int8 times scale_BKS1.

    The scale is the largest entry of a token's head over 127, float32: 4 bytes for every H.
    """

    x_BKSH: jax.Array
    scale_BKS1: jax.Array | None = None

    @classmethod
    def empty(cls, shape_BKSH: tuple[int, ...], dtype: Any, quantized: bool) -> "Held":
        """Zeros, so that no place ever holds NaN."""
        if not quantized:
            return cls(jnp.zeros(shape_BKSH, dtype))
        return cls(jnp.zeros(shape_BKSH, jnp.int8), jnp.zeros((*shape_BKSH[:3], 1), jnp.float32))

    def write(self, new_BTKH: jax.Array, place_BT: jax.Array) -> "Held":
        """With new entries; a place past the end is dropped."""
        new = Held(new_BTKH.astype(self.x_BKSH.dtype)) if self.scale_BKS1 is None else _quantize(
            new_BTKH)
        rows_B1 = jnp.arange(place_BT.shape[0])[:, None]
        return jax.tree.map(lambda old, x: old.at[rows_B1, :, place_BT].set(
            x, mode="drop", unique_indices=True), self, new)

    def read(self, dtype: Any, order_BS: jax.Array | None = None) -> jax.Array:
        """[B, S, K, H] in `dtype`, in the order of places or in another."""
        held = self if order_BS is None else jax.tree.map(
            lambda x: jnp.take_along_axis(x, order_BS[:, None, :, None], axis=2), self)
        x_BKSH = held.x_BKSH.astype(dtype)
        if held.scale_BKS1 is not None:
            x_BKSH = (held.x_BKSH.astype(jnp.float32) * held.scale_BKS1).astype(dtype)
        return jnp.swapaxes(x_BKSH, 1, 2)


def _quantize(x_BTKH: jax.Array) -> Held:
    x = x_BTKH.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    # NaN has no int8, so it goes into the scale, and 0 / 0 is kept out.
    return Held(jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, an argument and a result of `decode.extend`.

    Attributes:
      k, v: for each layer.
      length_B: int32, tokens of each row so far.
      size: tokens that a row can have.
      ring: whether the places hold the last tokens only, token t at place t modulo their number.
    """

    k: tuple[Held, ...]
    v: tuple[Held, ...]
    length_B: jax.Array
    size: int = field(metadata={"static": True})
    ring: bool = field(default=False, metadata={"static": True})

    @property
    def places(self) -> int:
        """S, the places of every row."""
        return self.k[0].x_BKSH.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.k, self.v)))


def empty_cache(cfg: ModelConfig, batch: int, size: int, kind: str = "model") -> Cache:
    """A cache without tokens.

    Args:
      kind: "model" keeps the dtype of the model, "int8" a byte for every number, with rounding.

    Raises:
      UserError: unknown kind.
    """
    check_kind(kind)
    places = places_of(cfg, size)
    shape = (batch, cfg.groups, places, cfg.head_width)
    layer = [Held.empty(shape, cfg.dtype, kind == "int8") for _ in range(2 * cfg.layers)]
    return Cache(tuple(layer[::2]), tuple(layer[1::2]), jnp.zeros((batch,), jnp.int32), size,
                 places < size)


def check_kind(kind: str) -> None:
    """Raise UserError unless `kind` is a format of a cache."""
    if kind not in FORMATS:
        raise UserError(f"a cache of kind {kind!r} is unknown; choose from {', '.join(FORMATS)}.")


def places_of(cfg: ModelConfig, size: int) -> int:
    """S of a cache for texts of `size` tokens: as many, or the window of a ring."""
    return min(size, ring_width(parse_mask(cfg.mask)) or size)


def ring_width(rule: Rule) -> int | None:
    """W of a rule that depends on q - k alone and shows the last W tokens only; else None."""
    low, high = rule.band() or (0.0, float("inf"))
    return int(high) + 1 if low >= 0 and 0 <= high < float("inf") else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """What the new tokens of one call see, the same in every layer.

    Attributes:
      place_BT: where each new token is kept; past the end = nowhere.
      mask: over the keys of `extend`, with `start` the index of the first query among them.
      k_positions_BS: positions of those keys, those that do not exist yet among them.
      order_BS: places in the order of their tokens, where new tokens are put behind the old ones
        instead of among them: several at once into a ring, some of which replace what others see.
      length_B: tokens of each row, the new ones included.
    """

    place_BT: jax.Array
    mask: Mask
    k_positions_BS: jax.Array
    start: Any
    order_BS: jax.Array | None
    length_B: jax.Array

    def extend(self, held: Held, new_BTKH: jax.Array) -> tuple[jax.Array, Held]:
        """All keys (or values) [B, S, K, H] that the new tokens may see, and what is kept."""
        kept = held.write(new_BTKH, self.place_BT)
        if self.order_BS is None:
            return kept.read(new_BTKH.dtype), kept
        old_BSKH = held.read(new_BTKH.dtype, self.order_BS)
        if held.scale_BKS1 is not None:  # rounded like those that are read back later
            new_BTKH = Held(*_rows(_quantize(new_BTKH))).read(new_BTKH.dtype)
        return jnp.concatenate([old_BSKH, new_BTKH], axis=1), kept


def _rows(new: Held) -> tuple[jax.Array, jax.Array]:
    return jnp.swapaxes(new.x_BKSH, 1, 2), jnp.swapaxes(new.scale_BKS1, 1, 2)


def view_of(cache: Cache, rule: Rule, positions_BT: jax.Array, lengths_B: jax.Array,
            ordered: bool = False) -> View:
    """How tokens at `positions_BT`, of which the first `lengths_B` are text, meet a cache.

    Args:
      ordered: whether keys must come in the order of their tokens, not only with their positions.
    """
    (T, S), length_B = (positions_BT.shape[1], cache.places), cache.length_B + lengths_B
    is_text_BT = jnp.arange(T)[None] < lengths_B[:, None]
    if not cache.ring:
        place_BT = jnp.where(is_text_BT, positions_BT, S)
        return View(place_BT, Mask(rule, k_lengths_B=length_B, finite=True),
                    jnp.arange(S, dtype=jnp.int32)[None], cache.length_B, None, length_B)
    # Of more tokens than places the last ones stay; beyond the size of the text none does.
    stays_BT = is_text_BT & (positions_BT >= length_B[:, None] - S) & (positions_BT < cache.size)
    place_BT = jnp.where(stays_BT, positions_BT % S, S)
    if T == 1 and not ordered:
        # The token at place s is the latest whose position is s modulo S.
        back_BS = (positions_BT - jnp.arange(S, dtype=jnp.int32)[None]) % S
        k_positions_BS, order_BS, start = positions_BT - back_BS, None, None
        seen_BS = rule.allowed(positions_BT, k_positions_BS) & (k_positions_BS >= 0)
        rule, q_segments_BT = Full(), jnp.ones_like(positions_BT)
    else:
        k_positions_BS = cache.length_B[:, None] - S + jnp.arange(S + T, dtype=jnp.int32)[None]
        order_BS, start = k_positions_BS[:, :S] % S, S
        old_BS = k_positions_BS[:, :S] >= 0
        seen_BS = jnp.concatenate([old_BS, is_text_BT], axis=1)
        q_segments_BT = is_text_BT.astype(jnp.int32)
    # New tokens stand among the keys before padding is dropped, which may hold anything.
    mask = Mask(rule, q_segments_BT, seen_BS.astype(jnp.int32), finite=order_BS is None)
    return View(place_BT, mask, jnp.maximum(k_positions_BS, 0), start, order_BS, length_B)
