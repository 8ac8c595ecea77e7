"""Continue a text with a trained language model: `python launch.py --generate --run=DIR`.

The text appears as it is made. Past the length that the model was trained on, or past the memory of
the device, it says what will happen and goes on only with --past_limits.
"""

import dataclasses
from dataclasses import dataclass, field

import jax
import numpy as np
from rich.console import Console

from experiments._run import find_run, read_tokenizer, restore
from tx_jax import limits, models
from tx_jax.cache import FORMATS
from tx_jax.config import check, option
from tx_jax.decode import Sampling, stream
from tx_jax.errors import UserError
from tx_jax.models import DecoderLM
from tx_jax.tokenizers import Tokenizer

MOST = 200  # new tokens where none are asked for


@dataclass(frozen=True)
class Settings:
    """Flags of `--generate` besides those of sampling."""

    run: str = option("", "working directory of a language_model run, or one of its cells/ID")
    prompt: str = option("", "the text to continue")
    new_tokens: int = option(0, f"tokens to add; 0 = up to {MOST}, within the trained length",
                             low=0)
    seed: int = option(0, "of the draws; the same seed gives the same text", low=0)
    cache: str = option("model", "numbers of the cache: the model's dtype, or int8 with rounding",
                        choices=FORMATS)
    chunk: int = option(0, "tokens of the prompt read at a time; 0 = all", low=0)
    past_limits: bool = option(False, "go on past the trained length or the device's memory")
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check(self, "")


def continue_text(settings: Settings, console: Console) -> str:
    """Print the prompt and its continuation as it comes, and return both.

    Raises:
      UserError: the run, the prompt or a flag cannot be used, or a limit is passed unasked.
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
    new_tokens = settings.new_tokens or max(1, min(MOST, found.context - len(ids)))
    if beyond := _beyond(model, settings, len(ids), new_tokens):
        if not settings.past_limits:
            raise UserError(f"{beyond}; ask for less, or add --past_limits to go on.")
        console.print(f"note: {beyond}.", highlight=False)
    params = restore(found, model, console.print).state.params
    pieces = stream(model, params, [ids], new_tokens, settings.sampling,
                    jax.random.key(settings.seed), kind=settings.cache, chunk=settings.chunk,
                    stop=tokenizer.eos_id)
    return _show(pieces, ids, tokenizer, console)


def _beyond(model: DecoderLM, settings: Settings, length: int, new_tokens: int) -> str:
    """What happens past the limits that this text passes, in words; "" within all of them."""
    total, found = length + new_tokens, []
    if total > model.context:
        found.append(f"the model was trained on {model.context} in a row, so that later positions "
                     f"({model.cfg.positions}) are new to it and the text gets worse, see "
                     "--experiment=length_extrapolation")
    need = limits.predict(model, 1, total, settings.cache, settings.chunk or length)
    if need.total > (has := limits.device_bytes("this")):
        cache = limits.cache_bytes(model.cfg, 1, total, settings.cache)
        found.append(f"they take {_size(need.total)} ({_size(cache)} of it cache) and the device "
                     f"has {_size(has)}, so that the run will probably end out of memory")
    return found and (f"{length} tokens of prompt and {new_tokens} new ones make {total}, but "
                      + ", and ".join(found)) or ""


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _show(pieces, ids: np.ndarray, tokenizer: Tokenizer, console: Console) -> str:
    """Print text piece by piece; a character whose bytes are not all there yet waits."""
    shown, text = "", tokenizer.decode(ids)
    for piece in pieces:
        new = piece[0]
        ends = np.flatnonzero(new == tokenizer.eos_id) if tokenizer.eos_id is not None else []
        ids = np.concatenate([ids, new[:ends[0]] if len(ends) else new])
        # Decoded together, as a character may lie across a seam.
        text = tokenizer.decode(ids)
        whole = text.rstrip("\ufffd")
        console.print(whole[len(shown):], end="", highlight=False, markup=False, soft_wrap=True)
        shown = whole
        if len(ends):
            break
    console.print(text[len(shown):], highlight=False, markup=False, soft_wrap=True)
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
