"""Tile sizes of the forward kernel and what they cost in shared memory."""

from dataclasses import dataclass

# Head widths with a kernel of their own; others are padded to the next one.
WIDTHS = (64, 128, 256)
# Warpgroups that compute; one more loads.
COMPUTE = 2
# Shared memory that one block may use on Hopper.
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Config:
    """Tiles of the forward kernel.

    Attributes:
      block_q: query rows of one compute warpgroup, a multiple of 64; a block of the grid owns two.
      block_kv: keys per step, a multiple of 64.
      stages: places in the ring of key and value tiles.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2

    @property
    def rows(self) -> int:
        """Query rows of a block of the grid."""
        return COMPUTE * self.block_q

    def shared_bytes(self, width: int) -> int:
        """Shared memory of queries (reused for the output), keys, values and log-sum-exp."""
        return 2 * width * (self.rows + 2 * self.stages * self.block_kv) + 4 * self.rows


def default_config(width: int) -> Config:
    """Tiles for a head width of `WIDTHS`; chosen by what fits, not yet by timing.

    Raises:
      ValueError: there is no kernel of this width.
    """
    if width not in WIDTHS:
        raise ValueError(f"head width {width} has no kernel of its own; pad it to one of {WIDTHS}.")
    return Config(block_kv=64) if width == 256 else Config()


def padded_width(width: int) -> int:
    """The head width of the kernel that takes heads of this width.

    Raises:
      ValueError: heads are wider than every kernel.
    """
    fits = [w for w in WIDTHS if w >= width]
    if not fits:
        raise ValueError(f"heads of width {width} are wider than {WIDTHS[-1]}.")
    return fits[0]
