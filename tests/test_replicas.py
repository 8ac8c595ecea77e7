"""The replica axis: every strategy gives each replica what its lone run gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax.errors import UserError
from tx_jax.study.flops import count_flops
from tx_jax.study.layout import Keys
from tx_jax.study.replicas import STRATEGIES, Program, candidates, make_layout, run_replicas
from tx_jax.study.runner import _Pool

TRACES = []


def _init(replica, shared):
    w_DD = jax.random.normal(replica["key"], (4, 4)) * shared["width"]
    return {"w_DD": w_DD, "key": jax.random.fold_in(replica["key"], 1), "n": jnp.int32(0)}


def _step(replica, carry, shared):
    TRACES.append(1)

    def one(carry, _):
        key, sub = jax.random.split(carry["key"])
        x_BD = jax.random.normal(sub, (3, 4))
        loss, grad_DD = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x_BD @ w) - x_BD) ** 2))(
            carry["w_DD"])
        w_DD = carry["w_DD"] - replica["lr"] * grad_DD
        return {"w_DD": w_DD, "key": key, "n": carry["n"] + 1}, loss

    carry, loss_K = jax.lax.scan(one, carry, None, length=5)
    return carry, {"loss": loss_K[-1], "n": carry["n"], "all_K": loss_K}


PROGRAM = Program(_init, _step)
INIT, STEP = jax.jit(_init), jax.jit(_step)


@pytest.fixture(scope="module")
def cache():
    """Compiled programs shared by the tests that do not count compilations."""
    return {}


def _replicas(count):
    return {"key": jax.random.split(jax.random.key(3), count),
            "lr": jnp.linspace(0.01, 0.5, count, dtype=jnp.float32)}


SHARED = {"width": jnp.float32(0.5)}


def _lone(replica, chunks):
    carry, records = INIT(replica, SHARED), []
    for _ in range(chunks):
        carry, record = STEP(replica, carry, SHARED)
        records.append(record)
    return carry, records


@pytest.mark.parametrize(("strategy", "count", "devices"), [
    *((s, 5, 2) for s in (*STRATEGIES, "auto")), ("auto", 1, 1), ("queue", 1, 2), ("map", 5, 1),
    ("queue", 4, 2), ("sharded", 3, 8)])
def test_a_replica_equals_its_lone_run(strategy, count, devices, cache):
    replicas = _replicas(count)
    result = run_replicas(PROGRAM, replicas, SHARED, 3, strategy=strategy,
                          devices=jax.devices()[:devices], cache=cache)
    assert result.lengths.tolist() == [3] * count
    assert result.strategy in STRATEGIES
    for r in range(count):
        carry, records = _lone(jax.tree.map(lambda x, r=r: x[r], replicas), 3)
        np.testing.assert_allclose(result.carries["w_DD"][r], carry["w_DD"], rtol=2e-5, atol=1e-6)
        assert jnp.array_equal(jax.random.key_data(result.carries["key"][r]),
                               jax.random.key_data(carry["key"]))
        assert result.records["n"][r].tolist() == [5, 10, 15]
        np.testing.assert_allclose(result.records["all_K"][r],
                                   np.stack([x["all_K"] for x in records]), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_early_stop_ends_one_replica_and_leaves_the_others_alone(strategy, cache):
    devices = jax.devices()[:2]
    whole = run_replicas(PROGRAM, _replicas(5), SHARED, 6, strategy=strategy, devices=devices,
                         cache=cache)
    loss_RC = whole.records["loss"]
    bar = float(np.sort(loss_RC[:, 2])[1])
    seen = []
    part = run_replicas(PROGRAM, _replicas(5), SHARED, 6, strategy=strategy, devices=devices,
                        stop=lambda record: bool(record["loss"] <= bar), progress=seen.append,
                        cache=cache)
    want = [int(np.argmax(row <= bar)) + 1 if (row <= bar).any() else 6 for row in loss_RC]
    assert min(want) < 6 and max(want) == 6
    assert part.lengths.tolist() == want
    assert sum(seen) == sum(want)
    for r, n in enumerate(want):
        np.testing.assert_array_equal(part.records["loss"][r, :n], loss_RC[r, :n])
        assert np.isnan(part.records["loss"][r, n:]).all()
        assert int(part.carries["n"][r]) == 5 * n
        if n == 6:
            np.testing.assert_array_equal(part.carries["w_DD"][r], whole.carries["w_DD"][r])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_compilation_per_shape(strategy, caplog):
    devices = jax.devices()[:2]
    cache = {}
    run_replicas(PROGRAM, _replicas(5), SHARED, 2, strategy=strategy, devices=devices, cache=cache)
    again = {**_replicas(5), "lr": jnp.full(5, 0.2, jnp.float32)}
    before = len(TRACES)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        result = run_replicas(PROGRAM, again, SHARED, 7, strategy=strategy, devices=devices,
                              cache=cache)
    assert not [r.message for r in caplog.records if "XLA compilation" in r.message]
    assert len(TRACES) == before and len(cache) == 1
    assert result.compile_seconds == 0.0


def test_a_fresh_run_compiles_init_and_step_once(caplog):
    with jax.log_compiles(), caplog.at_level("WARNING"):
        result = run_replicas(PROGRAM, _replicas(5), SHARED, 4, strategy="queue",
                              devices=jax.devices()[:2])
    compiled = [r.message for r in caplog.records if "Finished XLA compilation" in r.message]
    assert len(compiled) == 2, compiled
    assert result.compile_seconds > 0


def test_auto_times_its_candidates_takes_the_fastest_and_remembers_it(cache):
    devices, local = jax.devices()[:2], dict(cache)
    result = run_replicas(PROGRAM, _replicas(5), SHARED, 2, devices=devices, cache=local)
    assert set(result.timings) == set(candidates(5, devices))
    assert result.strategy == min(result.timings, key=result.timings.get)
    again = run_replicas(PROGRAM, _replicas(5), SHARED, 2, devices=devices, cache=local)
    assert (again.timings, again.strategy) == (result.timings, result.strategy)
    assert candidates(1, devices) == ("sequential",)


def _runner(cache, strategy):
    run_replicas(PROGRAM, _replicas(5), SHARED, 1, strategy=strategy, devices=jax.devices()[:2],
                 cache=cache)
    layout = make_layout(strategy, 5, jax.devices()[:2])
    return next(v for k, v in cache.items() if k[0] == layout)


def _raw():
    return jax.tree.map(np.asarray, Keys.of(_replicas(5)).unwrap(_replicas(5)))


def test_a_queue_is_timed_by_full_rounds(cache, monkeypatch):
    """Five on two devices take 2.5 rounds a chunk; the third round of one chunk is half empty."""
    clock, active = iter([0.0, 2.0]), []
    runner = _runner(cache, "queue")

    def watched(flags, *args):
        active.extend(np.asarray(flags).tolist())
        return runner.step_fn(flags, *args)

    monkeypatch.setattr("tx_jax.study.runner.time.perf_counter", lambda: next(clock))
    timed = dataclasses.replace(runner, step_fn=watched).time_chunk(_raw(), SHARED, 4)
    assert active == [True] * 4 and timed == 2.0 / 2 * 10 / 4


def test_a_replica_returns_to_the_device_that_holds_its_carry(cache):
    pool = _Pool(_runner(cache, "queue"), _raw(), SHARED, 5)
    seen = [pool.seat(wanted) for wanted in ([0, 1], [2, 3], [4, 0], [1, 2], [3, 4])]
    assert seen == [[0, 1], [2, 3], [4, 0], [2, 1], [4, 3]], "4 and 0 both lie on the first"


def test_queue_is_balanced_and_seconds_are_shared_by_chunks_run(cache):
    layout = make_layout("queue", 5, jax.devices()[:2])
    assert layout.slots == 2
    result = run_replicas(PROGRAM, _replicas(5), SHARED, 4, strategy="queue",
                          devices=jax.devices()[:2], cache=cache)
    assert sum(result.share(r) for r in range(5)) == pytest.approx(result.seconds)


def test_errors_name_the_value():
    with pytest.raises(UserError, match="did you mean 'sharded'"):
        run_replicas(PROGRAM, _replicas(2), SHARED, 1, strategy="shared")
    with pytest.raises(UserError, match="0 chunks"):
        run_replicas(PROGRAM, _replicas(2), SHARED, 0)


def test_flops_of_a_scan_count_every_iteration():
    w_DD = jnp.ones((8, 8), jnp.float32)

    def once(x_BD):
        return x_BD @ w_DD

    def scanned(x_BD):
        return jax.lax.scan(lambda x, _: (x @ w_DD, None), x_BD, None, length=7)[0]

    x_BD = jnp.ones((3, 8), jnp.float32)
    assert count_flops(once, x_BD) == 2 * 3 * 8 * 8
    assert count_flops(scanned, x_BD) == 7 * 2 * 3 * 8 * 8
    assert count_flops(jax.grad(lambda x: jnp.sum(once(x))), x_BD) >= 2 * 2 * 3 * 8 * 8
    lowered = jax.jit(once).lower(x_BD).cost_analysis()["flops"]
    assert count_flops(once, x_BD) == lowered
