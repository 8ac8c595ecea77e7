"""Attention: one contract (`_contract.py`), implementations of the same mathematics (files of this
folder without `_`, each compared with `reference.py`), and score functions, which are variants."""

from tx_jax.attention._bias import Bias
from tx_jax.attention._capabilities import Capabilities, Request
from tx_jax.attention._contract import (
    SMALL,
    attend,
    implementations,
    request_of,
    resolve,
    source_hash,
)
from tx_jax.attention._dropout import Dropout
from tx_jax.attention._matrix import capability_matrix
from tx_jax.attention._trace import attention_statistics, attention_weights, trace_attention
from tx_jax.attention.scores import ScoreFunction, make_score

__all__ = ["SMALL", "Bias", "Capabilities", "Dropout", "Request", "ScoreFunction", "attend",
           "attention_statistics", "attention_weights", "capability_matrix", "implementations",
           "make_score", "request_of", "resolve", "source_hash", "trace_attention"]
