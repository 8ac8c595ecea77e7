"""The conformance suite of the attention contract, for this project's and for outside code.

`python launch.py --check_attention=my_package.my_module:my_function` prints a capability card. Each
property is one check by name (`values`, `visibility`, `terms`, `running`), compared with loops in
float64 (`loops`) that were written from the text of the contract.
"""

from tx_jax.conformance.card import CHECKS, Outcome, check_attention, run_check, run_checks
from tx_jax.conformance.loops import slow_attend, slow_keep
from tx_jax.conformance.subject import Check, Failure, Skip, Subject, load

__all__ = ["CHECKS", "Check", "Failure", "Outcome", "Skip", "Subject", "check_attention", "load",
           "run_check", "run_checks", "slow_attend", "slow_keep"]
