"""Mask rules: closed algebra, text form, alignment, segments, and the array they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.errors import UserError
from tx_jax.masks import (
    Causal,
    Dilated,
    Explicit,
    Full,
    Global,
    Mask,
    Prefix,
    Rule,
    Window,
    decode_row,
    dense_mask,
    hide_unseen,
    index_arrays,
    parse_mask,
    segments_from_lengths,
)

RULES = st.recursive(
    st.sampled_from([Full(), Causal(), Explicit("101 010")]) | st.integers(1, 9).map(Window)
    | st.integers(0, 9).map(Prefix) | st.integers(1, 4).map(Dilated)
    | st.integers(0, 4).map(Global),
    lambda inner: (st.tuples(inner, inner).map(lambda p: p[0] & p[1])
                   | st.tuples(inner, inner).map(lambda p: p[0] | p[1])
                   | inner.map(lambda r: ~r)), max_leaves=6)


def truth(rule: Rule, q: int, k: int) -> bool:
    """The meaning of a rule at one pair, written independently of `allowed`."""
    match type(rule).__name__:
        case "Full":
            return True
        case "Causal":
            return k <= q
        case "Window":
            return q - rule.width < k <= q
        case "Prefix":
            return k < rule.length
        case "Dilated":
            return (q - k) % rule.step == 0
        case "Global":
            return q < rule.count or k < rule.count
        case "Explicit":
            return 0 <= q < 2 and 0 <= k < 3 and (q + k) % 2 == 0
        case "And":
            return truth(rule.left, q, k) and truth(rule.right, q, k)
        case "Or":
            return truth(rule.left, q, k) or truth(rule.right, q, k)
        case "Not":
            return not truth(rule.rule, q, k)
    raise AssertionError(rule)


@settings(max_examples=40, deadline=None)
@given(rule=RULES, T=st.sampled_from([0, 1, 4]), S=st.sampled_from([0, 3, 6]),
       start=st.none() | st.integers(-3, 9))
def test_dense_mask_is_the_rule_at_every_pair(rule, T, S, start):
    first = S - T if start is None else start
    expected = [[truth(rule, first + t, s) for s in range(S)] for t in range(T)]
    got = np.asarray(dense_mask(rule, T, S, start))
    assert got.shape == (1, T, S) and got.dtype == bool
    np.testing.assert_array_equal(got[0], np.array(expected, bool).reshape(T, S))


@settings(max_examples=80, deadline=None)
@given(rule=RULES)
def test_text_and_hash_round_trip(rule):
    again = parse_mask(str(rule))
    assert again == rule and hash(again) == hash(rule) and str(again) == str(rule)


@settings(max_examples=30, deadline=None)
@given(rule=RULES, q=st.integers(0, 20), k=st.integers(0, 20))
def test_allowed_takes_numpy_jax_and_plain_integers(rule, q, k):
    expected = truth(rule, q, k)
    q_idx, k_idx = np.full((2, 1), q), np.full((1, 3), k)
    on_numpy = rule.allowed(q_idx, k_idx)
    assert isinstance(on_numpy, np.ndarray) and on_numpy.shape == (2, 3)
    assert on_numpy.dtype == bool and (on_numpy == expected).all()
    on_jax = rule.allowed(jnp.asarray(q_idx), jnp.asarray(k_idx))
    assert on_jax.dtype == bool and bool((on_jax == expected).all())
    assert rule.allowed(q, k) is expected


@pytest.mark.parametrize("text, rule", [
    ("causal", Causal()), (" causal & window(256) ", Causal() & Window(256)),
    ("causal | prefix(3)", Causal() | Prefix(3)), ("~(causal | full)", ~(Causal() | Full())),
    ("causal | full & window(2)", Causal() | (Full() & Window(2))),
    ("causal & (full & window(width=2))", Causal() & (Full() & Window(2))),
    ("causal & (global(2) | dilated(3))", Causal() & (Global(2) | Dilated(3))),
    ("explicit('10  01') & ~ full", Explicit("10 01") & ~Full())])
def test_parse(text, rule):
    assert parse_mask(text) == rule


@pytest.mark.parametrize("text, says", [
    ("casual", "did you mean 'causal'"), ("windw(3)", "did you mean 'window'"),
    ("causal and window(3)", "is not a rule"), ("causal & 3", "'3'"), ("", "cannot be read"),
    ("causal &", "cannot be read"), ("window", "window(width)"), ("window(1, 2)", "window(width)"),
    ("causal(2)", "written causal"), ("window(x)", "must be numbers"), ("window(w=3)", "width"),
    ("__import__('os')", "no mask rule"), ("window(0)", ">= 1"), ("window(-4)", "window(-4)"),
    ("window(2.0)", "2.0"), ("window(True)", "True"), ("prefix(-1)", ">= 0"),
    ("dilated(0)", ">= 1"), ("global(-1)", ">= 0"), ("globl(1)", "did you mean 'global'"),
    ("global", "global(count)"), ("explicit('12')", "0 and 1"), ("explicit('1 01')", "one length"),
    ("explicit('')", "table"), ("explicit(3)", "table"), ("global + full", "'global + full'"),
    ("causal + full", "is not a rule"), ("causal.full", "is not a rule"),
    ("window(width=3, width=4)", "gives width twice"), ("window(3, **{'width': 4})", "width"),
    ("window(1000000000000)", "window(1000000000000) is too large"),
    *((f"{name}(2147483648)", "up to 2147483647") for name in ("prefix", "global", "dilated")),
    (f"window(0x{'f' * 5000})", "2**19999 or more"), (f"window({'9' * 5000})", "cannot be read"),
    ("window({[]: 1})", "must be numbers"), ("~" * 3000 + "causal", "operators"),
    (" & ".join(["causal"] * 3000), "more than 100 operators"),
    (" + ".join(["causal"] * 3000), "mask"), ("(" * 3000 + "causal", "mask"),
    ("causal\n& full", "'causal & full' cannot be read"), ("(causal &\nfoo)", "named 'foo'"),
    ("explicit('global')", "explicit('global') is not a table"),
    ("explicit(global)", "'explicit(global)'"), ("global + explicit('global_')", "('global_')'"),
    ("global_(2)", "did you mean 'global'"), ("ｃausal", "plain (ASCII)"),
    ("segments", "Mask(rule, q_segments_BT"), ("causal & padding(3)", "come with the data"),
    ("lengths(x)", "come with the data")])
def test_wrong_text_is_one_sentence(text, says):
    with pytest.raises(UserError) as error:
        parse_mask(text)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_largest_masks():
    """The last count that is taken works, and so does the deepest rule."""
    assert np.asarray(dense_mask(parse_mask("window(2147483647)"), 4, 4)).sum() == 10
    deepest = parse_mask(" & ".join(["causal"] * 100))
    assert parse_mask(str(deepest)) == deepest
    assert np.asarray(dense_mask(deepest, 4, 4)).sum() == 10


def test_rule_does_not_combine_with_arrays():
    with pytest.raises(UserError, match="another rule only"):
        Causal() & jnp.ones((2, 2), bool)


def test_window_counts_the_query_itself():
    """A4 of the case list (transformers #39408): W keys, not W + 1."""
    def count(rule):
        return np.asarray(dense_mask(rule, 8, 8))[0].sum(axis=1).tolist()
    assert count(Causal() & Window(4)) == [1, 2, 3, 4, 4, 4, 4, 4]
    assert count(Window(1)) == [1] * 8
    assert count(Window(8)) == count(Window(99)) == count(Causal()) == list(range(1, 9))


def test_end_alignment():
    """A2 of the case list (pytorch #108108)."""
    assert np.asarray(dense_mask(Causal(), 2, 5))[0].tolist() == [[True] * 4 + [False], [True] * 5]
    assert np.asarray(dense_mask(Causal(), 5, 2))[0].sum(axis=1).tolist() == [0, 0, 0, 1, 2]
    square = dense_mask(Causal() & Window(3), 6, 6)
    np.testing.assert_array_equal(dense_mask(Causal() & Window(3), 2, 6), square[:, 4:])


def test_start_may_be_traced_and_differ_by_example():
    rows = jax.jit(lambda s: dense_mask(Causal(), 1, 5, s))
    assert np.asarray(rows(2))[0, 0].tolist() == [True, True, True, False, False]
    both = np.asarray(rows(jnp.array([0, 3])))
    assert both.shape == (2, 1, 5) and both[:, 0].sum(axis=1).tolist() == [1, 4]
    q_idx, k_idx = index_arrays(2, 3)
    assert q_idx.tolist() == [[[1], [2]]] and k_idx.tolist() == [[[0, 1, 2]]]


def test_segments_separate_documents_and_padding():
    seg = jnp.array([[1, 1, 2, 2, 0], [3, 0, 0, 3, 3]])
    got = np.asarray(dense_mask(Mask(Causal(), seg, seg), 5, 5))
    for b, t, s in np.ndindex(got.shape):
        assert got[b, t, s] == (s <= t and seg[b, t] == seg[b, s] and seg[b, t] != 0)


def test_prefix_lengths_per_example():
    got = np.asarray(dense_mask(Mask(Causal(), prefix_B=jnp.array([0, 2, 3])), 3, 3))
    assert got.sum(axis=2).tolist() == [[1, 2, 3], [2, 2, 3], [3, 3, 3]]
    same = dense_mask(Causal() | Prefix(2), 3, 3)
    np.testing.assert_array_equal(got[1:2], same)


def test_segments_from_lengths():
    assert segments_from_lengths(jnp.array([2, 0, 3]), 3).tolist() == [
        [1, 1, 0], [0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("mask, says", [
    (Mask(Causal(), jnp.ones((2, 4), int), None), "give both"),
    (Mask(Causal(), None, jnp.ones((2, 4), int)), "give both"),
    (Mask(Causal(), jnp.ones((2, 3), int), jnp.ones((2, 4), int)), "(2, 3)"),
    (Mask(Causal(), jnp.ones((4,), int), jnp.ones((2, 4), int)), "(4,)"),
    (Mask(Causal(), jnp.ones((2, 4)), jnp.ones((2, 4))), "float32"),
    (jnp.ones((4, 4), bool), "must be a Mask or a Rule")])
def test_wrong_masks_are_refused(mask, says):
    with pytest.raises(UserError) as error:
        dense_mask(mask, 4, 4)
    assert says in str(error.value)


def test_mask_is_a_pytree_with_a_static_rule():
    seg = jnp.array([[1, 1, 2], [1, 2, 0]])
    mask = Mask(Causal(), seg, seg)
    assert len(jax.tree.leaves(mask)) == 2
    traces = []

    @jax.jit
    def count(mask):
        traces.append(mask.rule)
        return dense_mask(mask, 3, 3).sum()

    assert int(count(mask)) == 6 and int(count(Mask(Causal(), seg[::-1], seg[::-1]))) == 6
    assert traces == [Causal()]
    per_example = jax.vmap(lambda s: dense_mask(Mask(Causal(), s[None], s[None]), 3, 3)[0])(seg)
    np.testing.assert_array_equal(per_example, dense_mask(mask, 3, 3))


def test_hide_unseen_zeroes_only_what_nobody_sees():
    q, k, v = (jnp.full((1, 3, 1, 2), x) for x in (1.0, 2.0, 3.0))
    mask = Mask(Causal(), jnp.array([[0, 1, 1]]), jnp.array([[0, 1, 1]]))
    hidden = hide_unseen(mask, q, k, v)
    for before, after in zip((q, k, v), hidden, strict=True):
        assert after[0, 0].tolist() == [[0.0, 0.0]] and bool((after[:, 1:] == before[:, 1:]).all())
    assert hide_unseen(None, q, k, v)[0] is q


def test_explicit_table_round_trip():
    table = np.random.default_rng(0).random((4, 6)) < 0.5
    rule = Explicit.of(table)
    np.testing.assert_array_equal(rule.table(), table)
    np.testing.assert_array_equal(dense_mask(rule, 4, 6, 0)[0], table)
    assert parse_mask(str(rule)) == rule
    with pytest.raises(UserError, match="int64"):
        Explicit.of(table.astype(int))


def test_key_lengths_and_narrowing():
    mask = Mask(Causal(), k_lengths_B=jnp.array([0, 2, 9])) & Window(2)
    got = np.asarray(dense_mask(mask, 3, 3))
    assert got.sum(axis=2).tolist() == [[0, 0, 0], [1, 2, 1], [1, 2, 2]]
    for wrong in (lambda: mask | Full(), lambda: ~mask, lambda: mask & mask,
                  lambda: Mask(prefix_B=jnp.array([1])) & Causal()):
        with pytest.raises(UserError, match="combine rules first"):
            wrong()
    for wrong in (Mask(k_lengths_B=jnp.ones((2, 2), int)), Mask(prefix_B=jnp.ones(2))):
        with pytest.raises(UserError, match="one integer per example"):
            dense_mask(wrong, 3, 3)


def test_decode_row_is_the_row_of_the_full_mask():
    rule = Causal() & (Window(3) | Global(1))
    full = np.asarray(dense_mask(rule, 8, 8))
    rows = jax.jit(lambda start: decode_row(rule, 8, start))
    for t in range(8):
        np.testing.assert_array_equal(rows(jnp.int32(t)), full[:, t])
    np.testing.assert_array_equal(rows(jnp.array([2, 5])), full[0, [2, 5]])
