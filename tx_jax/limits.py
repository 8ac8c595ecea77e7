"""How long a text may get: what a position scheme knows, what the model was trained on, what fits.
"""

import jax

from tx_jax.letters import letters_of, sizes
from tx_jax.models import DecoderLM
from tx_jax.positions import make_encoding


def max_length(model: DecoderLM) -> int | None:
    """The positions that the model's scheme knows; None = no limit."""
    encoding = make_encoding(model.cfg.positions)
    size = sizes(model.cfg, model.vocab, model.context)
    tables = jax.eval_shape(lambda key: encoding.init(key, size), jax.random.key(0))
    limits = [leaf.shape[letters_of(name).index("T")] for name, leaf in tables.items()
              if "T" in letters_of(name)]
    return min([*limits, *filter(None, [encoding.max_length])], default=None)
