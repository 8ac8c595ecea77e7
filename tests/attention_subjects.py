"""The implementations of attention that run here, as subjects of the conformance suite."""

from functools import partial

from tx_jax.attention import Request, blockwise, implementations
from tx_jax.conformance import load


def runs_here(name):
    """Whether the device of this process will do."""
    capabilities = implementations()[name]
    dtype = "float32" if capabilities.dtypes is None else sorted(capabilities.dtypes)[0]
    return not capabilities.lacks(Request(dtype=dtype))


def tiled(queries, keys):
    """Blockwise with tiles so small that every call has many, ragged ones."""
    function = partial(blockwise.attend, tiles=(queries, keys))
    function.CAPABILITIES = blockwise.CAPABILITIES
    return load(function, f"blockwise-{queries}x{keys}")


SUBJECTS = {name: load(name) for name in sorted(implementations()) if runs_here(name)}
SUBJECTS["blockwise-2x3"] = tiled(2, 3)
