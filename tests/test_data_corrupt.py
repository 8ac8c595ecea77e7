"""Hidden tokens and spans: shares, nothing lost, lengths that do not depend on the draw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tx_jax.data.corrupt import corrupt_spans, mask_tokens
from tx_jax.errors import UserError

MASK, V = 50, 50


def test_masked_tokens_have_the_published_shares():
    tokens = np.random.default_rng(0).integers(0, V, (400, 100)).astype(np.int32)
    inputs, targets = mask_tokens(np.random.default_rng(1), tokens, MASK, V)
    chosen = targets >= 0
    assert (chosen.sum(axis=1) == 15).all()
    np.testing.assert_array_equal(targets[chosen], tokens[chosen])
    np.testing.assert_array_equal(inputs[~chosen], tokens[~chosen])
    masked, same = (inputs[chosen] == MASK).mean(), (inputs[chosen] == tokens[chosen]).mean()
    assert abs(masked - 0.8) < 0.02 and abs(same - 0.1 - 0.1 / V) < 0.02


def restore(source, target, sentinel):
    """Put the spans of a target back into the places of their sentinels."""
    spans, found = {}, []
    for token in target:
        if token >= sentinel:
            spans[token] = span = []
        else:
            span.append(token)
    for token in source:
        found += spans[token] if token >= sentinel else [token]
    return found


@given(some.integers(2, 60), some.floats(0.05, 0.9), some.floats(1, 8), some.integers(0, 99))
def test_no_token_is_lost_and_lengths_are_fixed(n, rate, mean, seed):
    tokens = np.arange(n, dtype=np.int32)
    source, target = corrupt_spans(np.random.default_rng(seed), tokens, 100, rate, mean)
    assert restore(source, target, 100) == tokens.tolist()
    other = corrupt_spans(np.random.default_rng(seed + 1), tokens, 100, rate, mean)
    assert [len(x) for x in other] == [len(source), len(target)]
    marks = source[source >= 100]
    assert marks.tolist() == list(range(100, 100 + len(marks))) and target[-1] == 100 + len(marks)
    # A sentinel stands between seen tokens, so that two spans never touch.
    assert source[0] < 100 and (np.diff(np.flatnonzero(source >= 100)) > 1).all()


@pytest.mark.parametrize(("call", "words"), [
    (lambda r: corrupt_spans(r, np.arange(1), 100), "text of 1"),
    (lambda r: corrupt_spans(r, np.arange(9), 100, mean=0.5), "spans of 0.5"),
    (lambda r: corrupt_spans(r, np.arange(9), 100, mean=float("nan")), "spans of nan"),
    (lambda r: corrupt_spans(r, np.arange(9), 5), "token 8 would be read as a sentinel"),
    (lambda r: corrupt_spans(r, np.arange(9), 100, rate=1.0), "rate=1.0"),
    (lambda r: mask_tokens(r, np.ones((1, 4), np.int32), MASK, V, rate=0.0), "rate=0.0")])
def test_a_mistake_is_one_sentence(call, words):
    with pytest.raises(UserError, match=words):
        call(np.random.default_rng(0))
