"""A mask as a picture: rows are queries, columns are keys, lines are the borders of tiles."""

from pathlib import Path

import numpy as np

from tx_jax.masks.mask import Mask, dense_mask
from tx_jax.masks.rules import Rule
from tx_jax.masks.tiles import EMPTY, FULL, tile_kinds


def draw_mask(mask: Mask | Rule | str, T: int, S: int, path: str | Path, *, tile: int = 0,
              example: int = 0) -> Path:
    """Write a PNG of the mask of one example; with `tile`, skipped and full tiles are shaded."""
    # Imported late: a figure library is no part of computing attention.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dense = np.asarray(dense_mask(mask, T, S))
    figure = Figure(figsize=(4.2, 4.2 * max(0.4, min(2.5, T / S))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(dense[min(example, len(dense) - 1)], cmap="Blues", vmin=0, vmax=1.4,
                interpolation="nearest", extent=(-0.5, S - 0.5, T - 0.5, -0.5))
    if tile:
        kinds = np.asarray(tile_kinds(mask, T, S, q_tile=tile, k_tile=tile))
        shade = np.zeros((*kinds.shape[1:], 4))
        shade[kinds[min(example, len(kinds) - 1)] == EMPTY] = (0.5, 0.5, 0.5, 0.35)
        shade[kinds[min(example, len(kinds) - 1)] == FULL] = (0.1, 0.6, 0.1, 0.35)
        right, bottom = shade.shape[1] * tile - 0.5, shade.shape[0] * tile - 0.5
        axes.imshow(shade, interpolation="nearest", extent=(-0.5, right, bottom, -0.5))
        axes.set_xlim(-0.5, S - 0.5)
        axes.set_ylim(T - 0.5, -0.5)
    axes.set(xlabel="key", ylabel="query", title=str(mask.rule if isinstance(mask, Mask) else mask))
    axes.title.set_fontsize(9)
    figure.savefig(path, dpi=110)
    return Path(path)
