"""The test session is stricter than production: promotion errors and eight virtual devices."""

import os

# Compiling is most of what tests do: without optimisation it takes a third of the time.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key() -> jax.Array:
    """A fixed PRNG key."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The working directory of a tiny language model whose text is gone."""
    import launch  # here, as most tests need none of what it loads

    folder = tmp_path_factory.mktemp("lm")
    (folder / "owl.txt").write_text("the owl and the pussy-cat went to sea. " * 60)
    assert launch.main(["--experiment=language_model", "--preset=smoke", "--model.layers=2",
                        f"--data.text={folder / 'owl.txt'}", "--train.steps=2", "--cpu_devices=8",
                        "--train.eval_every=0", "--train.save_every=0",
                        f"--workdir={folder / 'run'}"]) == 0
    (folder / "owl.txt").unlink()
    return folder / "run"
