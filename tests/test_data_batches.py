"""Rows and batches: every window, every target once, packing, shards, exact resume."""

import collections
import json

import grain
import numpy as np
import pytest

from tx_jax.config import DataConfig
from tx_jax.data import epoch_starts, eval_batches, prepare, train_iterator, window_starts
from tx_jax.errors import UserError

LENGTHS = (1, 2, 3, 9, 10, 11, 40, 17, 5, 5, 30, 2, 8, 12)


@pytest.fixture
def make(tmp_path):
    """Prepare a corpus of documents whose tokens are all different: (prepared, cfg)."""
    def make(lengths, **options):
        path, code = tmp_path / "a.jsonl", iter(range(0x4e00, 0x9fff))
        documents = ["".join(chr(next(code)) for _ in range(n)) for n in lengths]
        path.write_text("\n".join(json.dumps({"text": d}) for d in documents), encoding="utf-8")
        cfg = DataConfig(text=str(path), **{"context": 8, "validation": 0.0, **options})
        return prepare(cfg, tmp_path / "cache"), cfg

    return make


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


def stack(batches, key):
    return np.concatenate([b[key] for b in batches])


def check_row_contract(batches, stream, context):
    """Inputs and targets are neighbours in `stream`; padding is marked in all four arrays."""
    following = dict(zip(stream[:-1], stream[1:], strict=True))
    for batch in batches:
        assert set(batch) == {"tokens_BT", "targets_BT", "segments_BT", "positions_BT"}
        for array in batch.values():
            assert array.dtype == np.int32 and array.shape == batch["tokens_BT"].shape
        assert batch["tokens_BT"].shape[1] == context
        padding = batch["segments_BT"] == 0
        assert (batch["targets_BT"][padding] == -1).all() and (batch["targets_BT"] >= 0)[
            ~padding].all()
        assert not batch["tokens_BT"][padding].any() and not batch["positions_BT"][padding].any()
        pairs = zip(batch["tokens_BT"][~padding], batch["targets_BT"][~padding], strict=True)
        assert all(following[t] == target for t, target in pairs)


# ---- windows (case D8)

def test_nine_tokens_are_one_window(make):
    prepared, cfg = make([9])
    stream = prepared.train.tokens()
    for batch in take(train_iterator(prepared, cfg, 2, seed=0), 5):
        assert (batch["tokens_BT"] == stream[:8]).all()
        assert (batch["targets_BT"] == stream[1:]).all()
        assert (batch["segments_BT"] == 1).all()
        assert (batch["positions_BT"] == np.arange(8)).all()


@pytest.mark.parametrize("n", [10, 16, 17, 24, 25, 40])
def test_every_possible_window_occurs_and_no_other(make, n):
    prepared, cfg = make([n])
    starts = window_starts(prepared, 8, 10, 100, seed=1)
    assert set(starts.reshape(-1)) == set(range(n - 8))
    batches = take(train_iterator(prepared, cfg, 10, seed=1), 20)
    check_row_contract(batches, prepared.train.tokens(), 8)


@pytest.mark.parametrize("n, context", [(9, 8), (17, 8), (18, 8), (100, 8), (1000, 7), (50, 1)])
def test_an_epoch_covers_the_text_once(n, context):
    for epoch in range(30):
        starts = epoch_starts(n, context, 3, epoch)
        covered = collections.Counter((starts[:, None] + np.arange(1, context + 1)[None, :]).flat)
        assert max(covered.values()) == 1 and min(covered) >= 1 and max(covered) <= n - 1
        assert len(covered) > n - 1 - 2 * context
        assert sorted(covered) == list(range(min(covered), max(covered) + 1))


def test_epochs_and_seeds_differ(make):
    prepared, _ = make([1000])
    orders = [epoch_starts(1000, 8, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert (np.diff(orders[0]) != 8).any()
    assert window_starts(prepared, 8, 4, 3, 2**40).shape == (3, 4)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_window_starts_are_the_order_of_the_iterator(make, batch):
    prepared, cfg = make([200])
    starts = window_starts(prepared, 8, batch, 40, seed=5)  # several epochs, batches across them
    stream = prepared.train.tokens()
    assert starts.dtype == np.int32 and starts.shape == (40, batch)
    batches = take(train_iterator(prepared, cfg, batch, seed=5), 40)
    for row, got in zip(starts, batches, strict=True):
        index = row[:, None] + np.arange(8)[None, :]
        assert (got["tokens_BT"] == stream[index]).all()
        assert (got["targets_BT"] == stream[index + 1]).all()


def test_too_short_for_a_window(make):
    prepared, cfg = make([9])
    with pytest.raises(UserError, match="has 9 tokens, .*context=9 needs 10"):
        window_starts(prepared, 9, 1, 1, 0)
    with pytest.raises(UserError, match="has 9 tokens"):
        train_iterator(prepared, DataConfig(text=cfg.text, context=9), 1, 0)


# ---- documents

@pytest.mark.parametrize("batch", [1, 4])
def test_packed_rows(make, batch):
    prepared, cfg = make(LENGTHS, packing="documents")
    stream, ends = prepared.train.tokens(), prepared.train.ends()
    batches = take(train_iterator(prepared, cfg, batch, seed=0), 60)
    # End-of-text tokens are alike, so the contract is checked on what is before them.
    where = {token: i for i, token in enumerate(stream) if token != prepared.tokenizer.eos_id}
    document = np.searchsorted(ends, np.arange(len(stream)), side="right")
    filled = 0
    for b in batches:
        for tokens, targets, segments, positions in zip(*(b[k] for k in (
                "tokens_BT", "targets_BT", "segments_BT", "positions_BT")), strict=True):
            assert prepared.tokenizer.eos_id not in tokens[segments > 0]  # only ever a target
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                index = np.array([where[t] for t in tokens[inside]])
                assert len(set(document[index])) == 1 and (np.diff(index) == 1).all()
                assert (targets[inside] == stream[index + 1]).all()
                assert (positions[inside] == np.arange(inside.sum())).all()
            padding = segments == 0
            assert (targets[padding] == -1).all() and not tokens[padding].any()
            filled += (~padding).sum()
    assert filled > 0.8 * 60 * batch * 8


def test_documents_of_an_epoch_all_come_and_orders_change(make):
    prepared, cfg = make(LENGTHS, packing="documents")
    eos = prepared.tokenizer.eos_id
    seen = collections.Counter()
    for b in take(train_iterator(prepared, cfg, 1, seed=0), 300):
        seen.update(b["targets_BT"][b["targets_BT"] >= 0].tolist())
    inner = [t for t in set(prepared.train.tokens().tolist()) - {eos} if t in seen]
    firsts = set(prepared.train.tokens()[[0, *prepared.train.ends()[:-1]]].tolist())
    assert set(inner) == set(prepared.train.tokens().tolist()) - {eos} - firsts
    assert max(seen[t] for t in inner) - min(seen[t] for t in inner) <= 3  # equal up to open rows
    one, other = (stack(take(train_iterator(prepared, cfg, 1, seed=s), 9), "tokens_BT")
                  for s in (0, 1))
    assert (one != other).any()


def test_last_token_of_a_cut_document_has_no_target(make):
    """One document, cut by the split: no end-of-text, the stream's end is never an input."""
    prepared, cfg = make([20], packing="documents")
    rows = take(train_iterator(prepared, cfg, 2, seed=0), 30)
    stream = prepared.train.tokens()
    inputs = set(stack(rows, "tokens_BT")[stack(rows, "segments_BT") > 0].tolist())
    assert inputs == set(stream[:-1].tolist())
    check_row_contract(rows, stream, 8)


# ---- exact continuation

@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("stop", [0, 1, 7, 50])
def test_state_continues_exactly(make, packing, stop):
    prepared, cfg = make(LENGTHS, packing=packing)
    whole = train_iterator(prepared, cfg, 3, seed=2)
    take(whole, stop)
    state = json.loads(json.dumps(whole.get_state()))
    rest = take(whole, 40)
    fresh = train_iterator(prepared, cfg, 3, seed=2)
    take(fresh, 5)
    fresh.set_state(state)
    for a, b in zip(rest, take(fresh, 40), strict=True):
        assert all((a[k] == b[k]).all() for k in a)
    assert isinstance(whole, grain.DatasetIterator)


def test_same_seed_same_batches(make):
    for packing in ("windows", "documents"):
        prepared, cfg = make(LENGTHS, packing=packing)
        one, other = (stack(take(train_iterator(prepared, cfg, 4, seed=7), 30), "tokens_BT")
                      for _ in range(2))
        assert (one == other).all()


# ---- processes

def test_processes_share_the_rows_of_one(make):
    prepared, cfg = make([300])
    whole = take(train_iterator(prepared, cfg, 6, seed=0), 40)
    shards = [take(train_iterator(prepared, cfg, 6, 0, p, 3), 40) for p in range(3)]
    for step, batch in enumerate(whole):
        for key, array in batch.items():
            assert (np.concatenate([shard[step][key] for shard in shards]) == array).all()


@pytest.mark.parametrize("count", [2, 3, 20])
def test_document_shards_are_disjoint(make, count):
    """More processes than documents included (case D9): all can take equal steps."""
    prepared, cfg = make([9] * 8, packing="documents")
    seen = collections.Counter()
    for p in range(count):
        batches = take(train_iterator(prepared, cfg, count, 0, p, count), 64)
        assert all(b["tokens_BT"].shape == (1, 8) for b in batches)
        rows = stack(batches, "tokens_BT")[:, 0]
        seen.update(rows.tolist())
    # Nine tokens and end of text give a piece of 8 and one of 1 pair; all come equally often.
    whole = [n for token, n in seen.items()]
    assert len(whole) <= 16 and max(whole) - min(whole) <= 2 * count * 32 / 8


@pytest.mark.parametrize("batch, index, count", [(4, 0, 3), (0, 0, 1), (4, 2, 2), (4, -1, 2)])
def test_batches_that_cannot_be_shared(make, batch, index, count):
    prepared, cfg = make([300], validation=0.5)
    with pytest.raises(UserError, match="process"):
        train_iterator(prepared, cfg, batch, 0, index, count)
    with pytest.raises(UserError, match="process"):
        eval_batches(prepared, cfg, batch, index, count)


# ---- evaluation (cases T5, D9)

@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("batch, count", [(1, 1), (4, 1), (10, 1), (64, 1), (3, 3), (60, 20)])
def test_every_validation_target_exactly_once(make, packing, batch, count):
    prepared, cfg = make(LENGTHS * 2, packing=packing, validation=0.5)
    stream, eos = prepared.validation.tokens(), prepared.tokenizer.eos_id
    firsts = [0] if packing == "windows" else [0, *prepared.validation.ends()[:-1].tolist()]
    expected = collections.Counter(np.delete(stream, firsts).tolist())
    shards = [list(eval_batches(prepared, cfg, batch, p, count)) for p in range(count)]
    assert len({len(shard) for shard in shards}) == 1
    batches = [b for shard in shards for b in shard]
    targets = stack(batches, "targets_BT")
    assert collections.Counter(targets[targets >= 0].tolist()) == expected
    assert sum(expected.values()) == prepared.n_validation_targets
    assert all(b["tokens_BT"].shape == (batch // count, 8) for b in batches)
    assert expected[eos] == prepared.validation.n_documents


def test_evaluation_can_be_read_again_and_does_not_depend_on_the_batch(make):
    for packing in ("windows", "documents"):
        prepared, cfg = make(LENGTHS, packing=packing, validation=0.5)
        rows = {}
        for batch in (1, 5):
            batches = eval_batches(prepared, cfg, batch)
            first, second = (stack(batches, "tokens_BT") for _ in range(2))
            assert (first == second).all()
            rows[batch] = first
        assert (rows[5][:len(rows[1])] == rows[1]).all() and not rows[5][len(rows[1]):].any()


def test_tiny_validation_parts(make):
    prepared, cfg = make([103], validation=3 / 103)  # shorter than a row: padded
    batches = list(eval_batches(prepared, cfg, 2))
    stream = prepared.validation.tokens()
    assert len(batches) == 1 and len(stream) == 3
    check_row_contract(batches, stream, 8)
    assert batches[0]["targets_BT"][0].tolist() == [*stream[1:], *[-1] * 6]
    for share in (0.0, 1 / 103):
        prepared, cfg = make([103], validation=share)
        with pytest.raises(UserError, match="has [01] tokens, .*--data.validation"):
            eval_batches(prepared, cfg, 2)
