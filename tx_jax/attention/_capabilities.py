"""What an implementation can do, and what a call asks of it."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax

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
    "projected_score": "a score that transforms queries and keys",
    "other_score": "a score that is not a dot product",
    "float64": "float64",
}


# What a platform is called in an error.
DEVICES = {"cpu": "a CPU", "cuda": "an NVIDIA GPU", "rocm": "an AMD GPU", "tpu": "a TPU"}


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
    projected_score: bool = False
    other_score: bool = False
    float64: bool = False


@dataclass(frozen=True)
class Request(_Features):
    """What one call of `attend` asks for; `request_of` derives it from the arguments.

    Attributes:
      rules: names of the elementary mask rules in use.
      score: name of the score function.
      queries: T; 0 = not said.
      logits: their number, B * N * T * S.
      dtype: of queries, keys and values.
      width: of a head, the larger of keys' and values'.
      platform: "cpu", "cuda", "rocm" or "tpu"; "" = where this process runs, asked only when an
        implementation is tied to one, so that planning starts no device.
    """

    rules: frozenset[str] = frozenset()
    score: str = "scaled_dot"
    queries: int = 0
    logits: int = 0
    dtype: str = "float32"
    width: int = 0
    platform: str = ""


@dataclass(frozen=True)
class Capabilities(_Features):
    """What an implementation does exactly. Everything is off unless declared.

    Attributes:
      rules: names of the mask rules it takes, in any combination; None = any rule.
      memory: growth of its memory, in letters.
      jvp: whether forward-mode derivatives work (jvp, jacfwd, Hessians); otherwise JAX refuses them
        with a TypeError. Reverse mode always works.
      dtypes: names of the dtypes it takes; None = any.
      platforms: where it runs, as in `Request.platform`; None = anywhere.
      max_width: the widest head it takes; None = any.
    """

    rules: frozenset[str] | None = frozenset()
    memory: str = ""
    jvp: bool = True
    dtypes: frozenset[str] | None = None
    platforms: frozenset[str] | None = None
    max_width: int | None = None

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
        if self.dtypes is not None and request.dtype not in self.dtypes:
            missing.append(f"{request.dtype} (it takes {' and '.join(sorted(self.dtypes))})")
        if self.max_width is not None and request.width > self.max_width:
            missing.append(f"heads of width {request.width} (it takes up to {self.max_width})")
        if self.platforms is not None:
            platform = request.platform or _this_platform()
            if platform not in self.platforms:
                needs = " or ".join(DEVICES[name] for name in sorted(self.platforms))
                missing.append(f"the device {platform} (it needs {needs})")
        return missing


def _this_platform() -> str:
    """Where JAX runs by default; NVIDIA and AMD are both "gpu" to it."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


assert [f.name for f in fields(_Features)] == list(FEATURES)
