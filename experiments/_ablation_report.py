"""What the block ablation says: verdicts, tables and figures from ledger rows alone."""

import math
from collections.abc import Sequence
from typing import Any

from experiments import _ablation_claims as claims
from experiments._ablation_arms import FAMILIES
from experiments._ablation_settings import Settings
from experiments._ablation_start import GRADIENT, RANK
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.figures import Figure
from tx_jax.study.report import Report, run_facts
from tx_jax.study.tables import Table
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]
Found = tuple[list[Claim], list[Table], list[Figure]]
_NATS = "nats per token"


def make_report(settings: Settings, rows: list[Row]) -> Report:
    """The report over the parts that have rows."""
    found: Found = ([], [], [])
    parts = {part: [r for r in rows if r["part"] == part]
             for part in ("training", "tuning", "rank", "gradient")}
    for part, make in (("training", _training), ("tuning", _tuning), ("rank", _rank),
                       ("gradient", _gradient)):
        new = make(settings, parts[part]) if parts[part] else ([], [], [])
        for total, own in zip(found, new, strict=True):
            total += own
    return Report(
        "Block ablation", SUMMARY,
        verdicts=(*judge_all(found[0]), *claims.beyond(parts["training"])),
        tables=tuple(found[1]), figures=tuple(found[2]),
        notes=(*NOTES, f"The p-values of the published claims are corrected by Holm over these "
                       f"{len(found[0])} claims, those of a table over its arms; intervals are of "
                       "single comparisons."),
        facts=run_facts(rows))


SUMMARY = (
    "A block is attention and a feed-forward layer, each with a norm and a residual connection. "
    "Every arm changes one thing. Before training, random weights show what depth does to the "
    "differences between tokens and to gradients; training shows what the change costs.",
    "Every comparison is over paired seeds: equal seeds share the order of all batches, and "
    "initial parameters where shapes allow. Each arm trains at its own learning rate, the best of "
    "a grid.")
NOTES = (
    "Intervals are 95 % t-intervals over seeds. They hold what training varies, not which text is "
    "scored: that is the same for all arms.",
    "The learning rate of an arm is chosen at seed 0, on the half of the held-out text that no "
    "other table shows. One seed may choose a neighbour of the best.",
    "A run of this size trains for a fraction of a pass over the text, but for the family of "
    "little text. It cannot show BLEU, the final loss of large models, RMSNorm's gain, the best "
    "number of heads, or which of Pre-LN and Post-LN ends lower; claims of that kind are listed "
    "with the difference seen and are not judged.",
    "Trained branches start (2L)^-1/2 smaller than the papers' (Radford et al. 2019, 2.3), which "
    "by itself makes deep Post-LN easier to train; the arms post_unit start at unit gain. The "
    "parts rank and gradient start at unit gain, but for the arm pre_scaled.",
    "Key width: the model has one width for queries, keys and values, so that values narrow too; "
    "Vaswani et al. 2017 narrow queries and keys alone.",
    "A model trained with few heads is not one whose heads were pruned after training (Michel et "
    "al. 2019; Voita et al. 2019).")


def _with_lr(rows: Sequence[Row]) -> list[Row]:
    """The learning rate that an arm chose as an axis, which tables can show."""
    return [row | {"axes": {"lr": row["metrics"]["lr"], **row["axes"]}} for row in rows]


def _families(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Family -> its arms with rows, the baseline first; families without a comparison are gone."""
    here = {row["arm"] for row in rows}
    found = {name: [a for a in arms if a in here] for name, arms in FAMILIES.items()}
    return {name: arms for name, arms in found.items()
            if len(arms) > 1 and arms[0] == FAMILIES[name][0]}


def _training(settings: Settings, rows: list[Row]) -> Found:
    shown, families = _with_lr(rows), _families(rows)
    made = [tables.ablation_table(
        [r for r in shown if r["arm"] in arms], "loss", arms[0], show=("lr",), arms=arms,
        title=f"Held-out loss: {family}", label=f"loss ({_NATS})", caption=_caption(settings, arms))
        for family, arms in families.items()]
    gaps = {family: {arm: [v - base[s] for s, v in claims.losses(rows, arm).items() if s in base]
                     for arm in arms[1:]}
            for family, arms in families.items()
            if (base := claims.losses(rows, arms[0]))}
    named = {f"{family}: minus {families[family][0]}": seen for family, seen in gaps.items()}
    drawn = [figures.dots(
        named, name="losses", title="Held-out loss minus that of the baseline", xlabel=_NATS,
        caption="Mean of paired differences with 95 % CI, single seeds as faint dots; every arm at "
                "its own learning rate. Axes differ.")] if named else []
    return claims.trained(rows), [*made, _costs(settings, rows)], drawn


def _caption(settings: Settings, arms: Sequence[str]) -> str:
    deep = "pre_layer" in arms
    steps = settings.deep_steps if deep else settings.steps
    text = f"the first {settings.few} tokens of the text" if "few" in arms else "the text"
    return (f"{settings.deep if deep else settings.layers} layers in the baseline, width "
            f"{settings.d_model}, {steps} steps of {settings.batch} rows of {settings.context} "
            f"tokens of {text}; plain cross-entropy, whatever is trained.")


def _costs(settings: Settings, rows: list[Row]) -> Table:
    """What every arm consists of, so that matched and unmatched ones are told apart."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cfg, optim = settings.model(arm), settings.optim(arm)
        m = next(row["metrics"] for row in rows if row["arm"] == arm)
        norm = "none" if cfg.norm == "none" else f"{cfg.norm}, {cfg.norm_position}"
        lines.append((arm, str(cfg.layers), f"{cfg.heads} x {cfg.head_width}",
                      "none" if cfg.mlp == "none" else f"{cfg.mlp}, {cfg.hidden}", norm,
                      f"{optim.warmup:g}", f"{m['parameters']:,}",
                      f"{m['flops_per_token'] / 1e6:.2f}"))
    return Table("What the arms are", ("arm", "layers", "heads x width", "feed-forward", "norm",
                                       "warm-up", "parameters", "MFLOP per token"), tuple(lines),
                 caption="Parameters without the embedding; operations of training, optimizer "
                         "included. Warm-up as a share of the steps.")


def _tuning(settings: Settings, rows: list[Row]) -> Found:
    arms = [a for a in settings.arms if any(r["arm"] == a for r in rows)]
    _, notes = tables.tune(rows, "tuning", over="lr", by=())
    lines = []
    for arm in arms:
        seen = {r["axes"]["lr"]: tables.values([r], "tuning")[r["seed"]]
                for r in rows if r["arm"] == arm}
        best = min(seen, key=lambda lr: seen[lr] if math.isfinite(seen[lr]) else math.inf)
        lines.append((arm, *(f"{seen[lr]:.3f}" if lr in seen else "–" for lr in settings.lrs),
                      f"{best:g}"))
    table = Table("Learning rates tried", ("arm", *(f"{lr:g}" for lr in settings.lrs), "chosen"),
                  tuple(lines), notes=tuple(notes),
                  caption=f"Loss at seed 0 on the tuning half ({_NATS}).",
                  commands=tuple((f"{r['arm']} lr={r['axes']['lr']:g}", r["command"])
                                 for r in rows if "command" in r))
    return [], [table], []


def _mean(values: Sequence[float]) -> str:
    s = st.summarize(values, bootstrap=0)
    # Where float32 rounds, the order of magnitude is all there is.
    return tables.interval(s) if s.mean > 1e-4 or s.mean < 0 else f"{s.mean:.0e}"


def _rank(settings: Settings, rows: list[Row]) -> Found:
    arms = [a for a in RANK if any(r["arm"] == a for r in rows)]
    last = len(rows[0]["metrics"]["ratio"]) - 1
    shown = sorted({0, 1, 2, 3, 4, last} & set(range(last + 1)))
    lines = [(arm, *(_mean(list(claims.at_layer(rows, arm, n).values())) for n in shown))
             for arm in arms]
    table = Table("Before training: how much of the stream differs between tokens",
                  ("blocks", *(f"after {n}" for n in shown)), tuple(lines),
                  caption="||X - mean row|| / ||X||, mean over seeds with 95 % CI; random weights "
                          "at unit gain, no mask, no positions. Below about 1e-6 float32 rounds.",
                  commands=tuple((f"{r['arm']} seed={r['seed']}", r["command"])
                                 for r in rows if "command" in r))
    # 0 has no logarithm.
    curves = {arm: [[math.log10(max(v, 1e-8)) for v in r["metrics"]["ratio"]]
                    for r in rows if r["arm"] == arm] for arm in arms}
    drawn = figures.curves(
        {"": curves}, name="rank", title="What depth leaves of the differences between tokens",
        x=range(last + 1), arms=tuple(RANK), xlabel="layer",
        ylabel="log10 of ||X - mean row|| / ||X||",
        caption="Before training; mean over seeds with 95 % CI, cut at -8. Float32 rounds at -7.")
    return claims.rank(rows), [table], [drawn]


def _gradient(settings: Settings, rows: list[Row]) -> Found:
    arms = [a for a in GRADIENT if any(r["arm"] == a for r in rows)]
    lines = []
    for arm in arms:
        for metric in ("first", "last"):
            own = [r for r in rows if r["arm"] == arm]
            by_depth = tables.split(own, ("layers",))
            lines.append((arm, metric, *(_mean(list(tables.values(found[arm], metric).values()))
                                         for found in by_depth.values()),
                          _mean(list(claims.slopes(rows, arm, metric).values()))
                          if len(by_depth) > 1 else "–"))
    depths = list(tables.split(rows, ("layers",)))
    table = Table("Before training: gradient of W_down",
                  ("norm", "layer", *(f"L = {g[0][1]}" for g in depths), "slope"), tuple(lines),
                  caption="Frobenius norm on random tokens, mean over seeds with 95 % CI; the "
                          "slope is that of its logarithm in log L over the three deepest models.")
    drawn = figures.lines(rows, "last", "layers", name="gradient", arms=tuple(GRADIENT), log_y=True,
                          title="Gradient of the last W_down before training", xlabel="layers",
                          ylabel="Frobenius norm", caption="Mean over seeds with 95 % CI.")
    return claims.gradient(rows), [table], [drawn]
