"""Continue a text with a trained language model: `python launch.py --generate --run=DIR`."""

import dataclasses
from dataclasses import dataclass, field

import jax
import numpy as np
from rich.console import Console

from experiments._run import find_run, read_tokenizer, restore
from tx_jax import models
from tx_jax.config import check, option
from tx_jax.decode import Sampling, generate
from tx_jax.errors import UserError
from tx_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Settings:
    """Flags of `--generate` besides those of sampling."""

    run: str = option("", "working directory of a language_model run, or one of its cells/ID")
    prompt: str = option("", "the text to continue")
    new_tokens: int = option(200, "tokens to add", low=1)
    seed: int = option(0, "of the draws; the same seed gives the same text", low=0)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check(self, "")


def continue_text(settings: Settings, console: Console) -> str:
    """Print the prompt and its continuation, and return both.

    Raises:
      UserError: the run, the prompt or a flag cannot be used.
    """
    if not settings.run:
        raise UserError("--generate needs a trained model; add --run=DIR, the --workdir of a "
                        "language_model run.")
    found = find_run(settings.run)
    tokenizer = read_tokenizer(found)
    ids = encode(settings.prompt, tokenizer)
    # Whichever implementation trained it, the best for this device decodes it.
    cfg = dataclasses.replace(found.model, attention="auto")
    model = models.build(cfg, tokenizer.vocab_size, found.context)
    params = restore(found, model, console.print).state.params
    new = generate(model, params, [ids], settings.new_tokens, settings.sampling,
                   jax.random.key(settings.seed))[0]
    if tokenizer.eos_id is not None and (ends := np.flatnonzero(new == tokenizer.eos_id)).size:
        new = new[:ends[0]]
    # Decoded together, as a character may lie across the seam.
    text = tokenizer.decode(np.concatenate([ids, new]))
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if len(ids) + len(new) > found.context:
        console.print(f"note: the model was trained on {found.context} tokens in a row; what "
                      f"follows token {found.context} lies beyond.", highlight=False)
    return text


def encode(prompt: str, tokenizer: Tokenizer) -> np.ndarray:
    """Token ids of the prompt; UserError if it is empty or unknown in part."""
    if not prompt:
        raise UserError("--prompt is empty; give a text to continue, as in --prompt=\"The \".")
    if unknown := tokenizer.unknown(prompt):
        shown = ", ".join(repr(piece) for piece in unknown[:5])
        raise UserError(f"--prompt holds {shown}{', ...' if unknown[5:] else ''}, unknown to the "
                        f"tokenizer {tokenizer.name} of this model; leave it out.")
    return tokenizer.encode(prompt)
