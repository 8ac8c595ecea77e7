"""What an implementation can do, and what a call asks of it."""

from dataclasses import dataclass, fields, replace
from typing import Any

# The features of a call, each with the words an error uses for it.
FEATURES = {
    "segments": "segment ids",
    "prefix_lengths": "prefix lengths per example",
    "key_lengths": "key lengths per example",
    "bias": "a dense bias",
    "pair_bias": "a bias function",
    "row_bias": "a bias on whole rows (CoPE)",
    "softcap": "a soft cap",
    "sink": "sinks",
    "dropout": "dropout",
    "gqa": "fewer key heads than query heads",
    "v_width": "values of another width than keys",
    "traced_scale": "a traced scale",
    "row_scale": "a scale per row (log_n)",
    "shifted": "a q_start other than S - T",
    "traced_start": "a traced q_start",
    "other_score": "a score that is not a dot product",
    "float64": "float64",
}


@dataclass(frozen=True)
class _Features:
    segments: bool = False
    prefix_lengths: bool = False
    key_lengths: bool = False
    bias: bool = False
    pair_bias: bool = False
    row_bias: bool = False
    softcap: bool = False
    sink: bool = False
    dropout: bool = False
    gqa: bool = False
    v_width: bool = False
    traced_scale: bool = False
    row_scale: bool = False
    shifted: bool = False
    traced_start: bool = False
    other_score: bool = False
    float64: bool = False


@dataclass(frozen=True)
class Request(_Features):
    """What one call of `attend` asks for; `request_of` derives it from the arguments.

    Attributes:
      rules: names of the elementary mask rules in use.
      score: name of the score function.
      logits: their number, B * N * T * S.
    """

    rules: frozenset[str] = frozenset()
    score: str = "scaled_dot"
    logits: int = 0


@dataclass(frozen=True)
class Capabilities(_Features):
    """What an implementation does exactly. Everything is off unless declared.

    Attributes:
      rules: names of the mask rules it takes, in any combination; None = any rule.
      memory: growth of its memory, in letters.
      jvp: whether forward-mode derivatives work (jvp, jacfwd, Hessians); otherwise JAX refuses them
        with a TypeError. Reverse mode always works.
    """

    rules: frozenset[str] | None = frozenset()
    memory: str = ""
    jvp: bool = True

    @classmethod
    def everything(cls, **changes: Any) -> "Capabilities":
        """Capabilities with every feature on, then changed."""
        every = cls(**dict.fromkeys(FEATURES, True), rules=None)
        return replace(every, **changes)

    def lacks(self, request: Request) -> list[str]:
        """What the request needs and this implementation cannot do, in words."""
        missing = [words for name, words in FEATURES.items()
                   if getattr(request, name) and not getattr(self, name)]
        if self.rules is not None:
            missing += [f"the mask rule {rule}" for rule in sorted(request.rules - self.rules)]
        return missing


assert [f.name for f in fields(_Features)] == list(FEATURES)
