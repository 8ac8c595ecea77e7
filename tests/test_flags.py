"""Flags from dataclasses: values reach the settings, and every mistake is one sentence."""

from dataclasses import dataclass, field

import pytest

from tx_jax import flags
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, check, option, resolved
from tx_jax.errors import UserError


@dataclass(frozen=True)
class Settings:
    seeds: int = option(5, "seeds", low=1)
    lrs: tuple[float, ...] = option((1e-3, 1e-2), "rates")
    sizes: tuple[int, ...] = option((1, 2), "sizes")
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        check(self, "")


EXTRA = {"preset": flags.Leaf("preset", str, "small", {})}


def build(*argv, swept=None):
    given = flags.parse(argv, Settings(), EXTRA)
    given.pop("preset", None)
    settings = flags.replace(Settings(), given)
    flags.check_effective(settings, given, swept or {})
    return settings


def test_values_of_every_type_arrive():
    settings = build("--seeds=3", "--lrs=0.1,1e-4", "--sizes", "4,5", "--model.d_model=64",
                     "--model.scan=False", "--model.mask=causal & window(8)", "--optim.lr=2e-3")
    assert settings.seeds == 3 and settings.lrs == (0.1, 1e-4) and settings.sizes == (4, 5)
    assert settings.model.d_model == 64 and settings.model.scan is False
    assert settings.model.mask == "causal & window(8)" and settings.optim.lr == 2e-3
    assert build() == Settings()


@pytest.mark.parametrize(("word", "value"), [
    ("--model.residual=False", False), ("--nomodel.residual", False), ("--model.residual=0", False),
    ("--model.residual", True), ("--model.residual=true", True)])
def test_booleans_are_never_silently_true(word, value):
    assert build(word).model.residual is value


@pytest.mark.parametrize(("argv", "words"), [
    (["--model.d_modle=64"], "no flag --model.d_modle, did you mean 'model.d_model'"),
    (["--learing_rate=1"], "no flag --learing_rate"),
    (["--lr=1"], "no flag --lr"),
    (["--model.d=64"], "no flag --model.d"),
    (["--model.residual=maybe"], "--model.residual=maybe is not true or false; write it like"),
    (["--model.residual", "False"], "'False' is not a flag"),
    (["stray"], "'stray' is not a flag"),
    (["--seeds=two"], "--seeds=two is not a whole number"),
    (["--seeds=2.5"], "--seeds=2.5 is not a whole number; write it like --seeds=5."),
    (["--seeds="], "--seeds= is not a whole number"),
    (["--optim.lr=1: 2"], "--optim.lr=1"),
    (["--optim.lr=fast"], "--optim.lr=fast is not a number; write it like --optim.lr=0.001."),
    (["--seeds=0"], "--seeds=0 is too small"),
    (["--sizes=1,x"], "--sizes=1,x is not a list of int"),
    (["--sizes="], "--sizes is empty"),
    (["--seeds=1", "--seeds=2"], "--seeds is given 2 times"),
    (["--optim.lr=nan"], "must be a finite number"),
    (["--optim.lr=-1"], "too small"),
    (["--model.norm=rsm"], "did you mean 'rms'"),
    (["--model.d_model=10", "--model.heads=3"], "not divisible"),
    (["--optim.schedule=constant", "--optim.floor=0.5"],
     "no effect with --optim.schedule=constant"),
])
def test_a_mistake_is_one_sentence_naming_the_flag(argv, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")) as caught:
        settings = Settings()
        given = flags.parse(argv, settings, EXTRA)
        settings = flags.replace(settings, given)
        flags.check_effective(settings, given, {})
    assert "\n" not in str(caught.value) and "invalid literal" not in str(caught.value)


def test_a_derived_default_written_out_is_the_same_configuration():
    open_, written = ModelConfig(), ModelConfig(kv_heads=4, head_dim=32, d_ff=512)
    assert open_ != written and resolved(open_) == resolved(written) == written
    assert resolved(Settings()) == resolved(Settings(model=written))
    assert resolved(ModelConfig(kv_heads=2)) != resolved(open_)
    assert resolved(ModelConfig(d_model=130, head_dim=32)).head_dim == 32


def test_flags_that_only_work_together_may_come_in_any_order():
    for argv in (("--model.d_model=30", "--model.heads=3"), ("--model.heads=3",
                                                             "--model.d_model=30")):
        assert build(*argv).model.d_model == 30


def test_a_swept_setting_is_refused_with_the_flag_that_decides():
    with pytest.raises(UserError, match="use --lrs"):
        build("--optim.lr=0.1", swept={"optim.lr": "lrs"})


def test_replace_refuses_an_unknown_name():
    with pytest.raises(UserError, match="'model.d_modl', did you mean 'model.d_model'"):
        flags.replace(Settings(), {"model.d_modl": 1})
