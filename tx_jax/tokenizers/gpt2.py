"""GPT-2's vocabulary of 50,257 tokens, from the file that ships with the project (no network)."""

import base64
import hashlib
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError
from tx_jax.tokenizers._base import dump
from tx_jax.tokenizers._bytepair import BytePairs

_FILE = Path(__file__).parent.parent / "texts" / "gpt2.tiktoken.xz"
_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


@dataclass(frozen=True)
class Trainer:
    """Nothing to train: the texts are not read."""

    def train(self, texts: Iterable[str]) -> "GPT2":
        """Return GPT-2's tokenizer."""
        del texts
        return GPT2()


def restore(data: dict[str, Any]) -> "GPT2":
    """Rebuild from the fields of `to_json`."""
    if data["sha256"] != _SHA256:
        raise UserError(f"the saved gpt2 tokenizer has another vocabulary ({data['sha256'][:12]}) "
                        f"than the one that ships here ({_SHA256[:12]}).")
    return GPT2()


class GPT2(BytePairs):
    """Ids equal those of `tiktoken.get_encoding("gpt2")`; end of text is 50256."""

    def __init__(self) -> None:
        super().__init__("gpt2", _read_tokens(_FILE))

    def to_json(self) -> str:
        return dump("gpt2", sha256=_SHA256)


def _read_tokens(path: Path) -> list[bytes]:
    """Read without tiktoken's loader, which caches by path and may delete what it reads."""
    try:
        raw = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as e:
        raise UserError(f"the GPT-2 vocabulary {path} cannot be read ({e}); install the project "
                        "again.") from e
    if hashlib.sha256(raw).hexdigest() != _SHA256:
        raise UserError(f"the GPT-2 vocabulary {path} is damaged; install the project again.")
    lines = [line.split() for line in raw.splitlines()]
    if [int(rank) for _, rank in lines] != list(range(len(lines))):
        raise UserError(f"the GPT-2 vocabulary {path} is damaged; install the project again.")
    return [base64.b64decode(token) for token, _ in lines]
