"""What the scaling ablation says: claims, tables and figures from ledger rows alone."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.report import Report
from tx_jax.study.tables import Table
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]


def make_report(rows: list[Row], *, arms: Sequence[str], baseline: str,
                retrieval_steps: int) -> Report:
    """The report over the parts that have rows."""
    parts = {part: [r for r in rows if r["part"] == part]
             for part in ("initial", "retrieval", "char_lm")}
    claims: list[Claim] = []
    found_tables: list[Table] = []
    found_figures: list[figures.Figure] = []
    for part, make in (("retrieval", _retrieval), ("char_lm", _char_lm), ("initial", _initial)):
        if parts[part]:
            claimed, made, drawn = make(parts[part], tuple(arms), baseline, retrieval_steps)
            claims += claimed
            found_tables += made
            found_figures += drawn
    kernels = sorted({r["kernel"] for r in rows if r["kernel"] != "none"})
    strategies = sorted({f"{r['part']}: {r['strategy']}" for r in rows if r["strategy"] != "none"})
    first = rows[0]
    return Report(
        "The 1/sqrt(d_k) ablation",
        ("Attention compares a query with keys by a score, scales it, and takes a softmax. The dot "
         "product of vectors with unit-variance entries has variance d_k: without the factor "
         "1/sqrt(d_k) the softmax saturates as d_k grows, and little gradient comes back. Below, "
         "every claim is a comparison over paired seeds: equal seeds share initial parameters "
         "where shapes allow, and the order of all batches.",
         "Read the tables by learning rate: how much the scale matters depends on it. Two things "
         "are at work, and the arm dot_small_init tells them apart: it is unscaled, but W_q starts "
         "1/sqrt(d_k) smaller, so that the softmax is not saturated at the start. Where it keeps "
         "up with scaled_dot, saturation was what slowed dot down; where it fails as dot does, it "
         "was the larger step that the same learning rate makes in the logits."),
        verdicts=judge_all(claims), tables=tuple(found_tables), figures=tuple(found_figures),
        notes=("A run of this size cannot show BLEU differences, the final loss of large models, "
               "or differences between 1/d and 1/sqrt(d) under learning-rate transfer over widths.",
               "Intervals are 95 % t-intervals over seeds. Losses compare by a paired t-test, "
               "times to solve by one on their logarithms, or by exact signed ranks where some "
               "seed never got there; with n seeds the latter cannot fall below 2^(1-n). Tables "
               "correct p by Holm over the arms of one group (one d_k and learning rate); the "
               f"p-values of the published claims are corrected by Holm over these {len(claims)} "
               "claims. Intervals are of single comparisons.",
               "The best learning rate is chosen on the seeds it is then compared on.",
               "At initialisation the mean gradient norm of unscaled attention is not small: rows "
               "near a tie carry it. The median and the 10th percentile show what starves."),
        facts=(("attention implementation", ", ".join(kernels) or "none"),
               ("replica strategy", ", ".join(strategies) or "none"),
               ("device", first["device"]),
               ("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)),
               ("code", first["code"][:12]), ("data", first["data"][:12]),
               ("cells", str(len(rows))),
               ("cell seconds in all", f"{sum(r['seconds'] for r in rows):.0f}")))


def _pick(rows: list[Row], arm: str, metric: str, **axes: Any) -> dict[int, float]:
    chosen = [r for r in rows if r["arm"] == arm and
              all(r["axes"].get(k) == v for k, v in axes.items())]
    return tables.values(chosen, metric) if chosen else {}


def _initial(rows, arms, baseline, _):
    shown = (("variance_ratio", "Var(q.k)/d_k"), ("saturated", "rows > .99"),
             ("entropy", "entropy (nats)"), ("gradient_mean", "gradient mean"),
             ("gradient_median", "median"), ("gradient_p10", "10th pct"))
    lines = []
    for ((_, d_k),), by_arm in tables.split(rows, ("d_k",)).items():
        for arm, members in by_arm.items():
            lines.append((arm, str(d_k), *(tables.interval(st.summarize(list(
                tables.values(members, metric).values()), bootstrap=0)) for metric, _ in shown)))
    table = Table("Before training: the softmax over random keys",
                  ("arm", "d_k", *(label for _, label in shown)), tuple(lines),
                  caption="Mean over seeds with 95 % CI. The gradient is the Frobenius norm of "
                          "d(weights)/d(query); q and k are iid normal.",
                  commands=tuple((f"{r['arm']} d_k={r['axes']['d_k']} seed={r['seed']}",
                                  r["command"]) for r in rows if "command" in r))
    widest = max(r["axes"]["d_k"] for r in rows)
    ratio = st.summarize(list(_pick(rows, baseline, "variance_ratio", d_k=widest).values()))
    claims = [
        Claim("The dot product of unit-variance queries and keys has variance d_k (Vaswani et "
              f"al. 2017, footnote 4), here at d_k={widest}",
              st.paired(_pick(rows, baseline, "variance_ratio", d_k=widest),
                        dict.fromkeys(_pick(rows, baseline, "variance_ratio", d_k=widest), 1.0)),
              "equal", margin=0.05)] if ratio.n else []
    if _pick(rows, "dot", "gradient_median", d_k=widest):
        claims.append(Claim(
            f"Unscaled, the softmax at d_k={widest} lies where its gradient is extremely small "
            "(Vaswani et al. 2017, 3.2.1): median gradient to the query against scaled",
            st.paired(_pick(rows, "dot", "gradient_median", d_k=widest),
                      _pick(rows, baseline, "gradient_median", d_k=widest)), "lower"))
    drawn = [figures.lines(rows, "saturated", "d_k", name="initial_saturated", arms=arms,
                           title="Saturated softmax rows before training",
                           ylabel="share of rows with a weight > 0.99", xlabel="d_k"),
             figures.lines(rows, "gradient_median", "d_k", name="initial_gradient", arms=arms,
                           title="Median gradient through the softmax before training", log_y=True,
                           ylabel="norm of d(weights)/d(query), median", xlabel="d_k")]
    return claims, [table], drawn


def _retrieval(rows, arms, baseline, steps):
    def rank(found: Sequence[float]) -> tuple[int, float]:
        return sum(not math.isfinite(v) for v in found), float(np.median(found))

    tuned, notes = tables.tune(rows, "steps_to_99.9", over="lr", by=("d_k",), rank=rank)
    made = [
        tables.times_table(rows, "steps_to_90", steps, baseline, by=("d_k", "lr"), arms=arms,
                           title="Retrieval: steps to 90 % accuracy", label="steps to 90 %",
                           caption=f"Median [range] over seeds; runs last {steps} steps. Accuracy "
                                   "is on fresh data, averaged over 10 steps."),
        tables.ablation_table(rows, "early_loss", baseline, by=("d_k", "lr"), arms=arms,
                              title="Retrieval: loss over the first 50 steps",
                              label="loss (nats)",
                              caption="On fresh data; every run lasts longer."),
        _final_loss(rows, arms),
        tables.times_table(tuned, "steps_to_99.9", steps, baseline, by=("d_k",), show=("lr",),
                           arms=arms, title="Retrieval at each arm's best learning rate",
                           label="steps to 99.9 %", notes=tuple(notes),
                           caption="Solved means that the last 50 steps are at 99.9 % too. The "
                                   "learning rate with most seeds solved and the smallest "
                                   "median, chosen per arm and d_k from the grid above."),
    ]
    drawn = [
        figures.lines(rows, "final_accuracy", "lr", name="retrieval_accuracy", panel="d_k",
                      arms=arms, ylabel="accuracy, last 50 steps", xlabel="learning rate",
                      title="Retrieval: at one small learning rate the effect hides",
                      caption="Mean over seeds with 95 % CI. At the smallest learning rate every "
                              "arm ends near 1, whatever d_k is."),
        figures.lines(rows, "steps_to_99.9", "lr", name="retrieval_lr", panel="d_k", arms=arms,
                      budget=steps, log_y=True, ylabel="steps to 99.9 %", xlabel="learning rate",
                      title="Retrieval: how far the learning rate can be raised",
                      caption="Median and range over seeds; open triangles: half of the seeds or "
                              "more never got there, or did not stay."),
        figures.lines(rows, "steps_to_90", "d_k", name="retrieval_d_k", panel="lr", arms=arms,
                      budget=steps, log_y=True, ylabel="steps to 90 %", xlabel="d_k",
                      title="Retrieval: steps to 90 % against d_k",
                      caption="One panel per learning rate; median and range over seeds."),
        _training_curves(rows, arms, 25, "accuracy", "retrieval_curves",
                         "Retrieval: accuracy while training at the widest d_k"),
    ]
    return _retrieval_claims(rows, baseline, steps), made, drawn


def _final_loss(rows: list[Row], arms: Sequence[str]) -> Table:
    """Final losses without comparisons: solved runs end early, so their lengths differ."""
    lines = []
    for group, by_arm in tables.split(rows, ("d_k", "lr")).items():
        for arm in [a for a in arms if a in by_arm]:
            loss, steps, accuracy = (list(tables.values(by_arm[arm], metric).values())
                                     for metric in ("final_loss", "steps", "final_accuracy"))
            lines.append((arm, *(f"{v:g}" for _, v in group),
                          tables.interval(st.summarize(loss, bootstrap=0)),
                          tables.interval(st.summarize(accuracy, bootstrap=0)),
                          f"{np.median(steps):g} [{min(steps):g}, {max(steps):g}]"))
    return Table("Retrieval: final loss and accuracy",
                 ("arm", "d_k", "lr", "final loss (nats)", "final accuracy", "steps run"),
                 tuple(lines), caption="Means of the last 50 steps, on fresh data. A run ends once "
                 "50 steps are answered 99.95 % right, unless --noretrieval.stop_when_solved is "
                 "given: losses of runs of different length are not to be compared.")


def _retrieval_claims(rows, baseline, steps):
    d_ks = sorted({r["axes"]["d_k"] for r in rows})
    lrs = sorted({r["axes"]["lr"] for r in rows})
    narrow, wide, low, high = d_ks[0], d_ks[-1], lrs[0], lrs[-1]
    found = []

    def against_width(arm: str, metric: str, claim: str, expected: str) -> None:
        first = _pick(rows, arm, metric, d_k=narrow, lr=high)
        last = _pick(rows, arm, metric, d_k=wide, lr=high)
        if first and last and narrow != wide:
            margin = 0.5 * float(np.median(list(first.values()))) if expected == "equal" else 0.0
            comparison = (st.paired if expected == "equal" and all(
                math.isfinite(v) for v in (*first.values(), *last.values()))
                else lambda a, b: st.paired_times(a, b, steps))(last, first)
            found.append(Claim(
                f"{claim}: steps to 90 % at d_k={wide} against d_k={narrow}, lr {high:g}",
                comparison, expected, margin=margin))

    against_width("dot", "steps_to_90", "Unscaled dot products get slower with d_k (Vaswani et al. "
                  "2017, 3.2.1; Britz et al. 2017: -4 BLEU at 1024)", "higher")
    for arm, name in ((baseline, "Scaled dot products do"),
                      ("additive", "Additive attention does"), ("qk_norm", "QK-norm does")):
        against_width(arm, "steps_to_90", f"{name} not get slower with d_k (Britz et al. 2017 for "
                      "additive; half the time at the small width allowed)", "equal")
    against = {baseline: "against scaled",
               "dot_small_init": "against the same dot product with W_q started 1/sqrt(d_k) "
                                 "smaller, whose softmax is not saturated at the start"}
    for other, words in against.items():
        first, last = (_pick(rows, arm, "final_accuracy", d_k=wide, lr=high)
                       for arm in (other, "dot"))
        if first and last:
            found.append(Claim(
                f"At the highest learning rate unscaled attention fails: accuracy over the last 50 "
                f"of {steps} steps {words}: d_k={wide}, lr {high:g}", st.paired(last, first),
                "lower"))
        first, last = (_pick(rows, arm, "steps_to_90", d_k=wide, lr=low) for arm in (other, "dot"))
        if first and last:
            found.append(Claim(
                f"Unscaled attention takes longer to reach 90 % {words}: d_k={wide}, lr {low:g}",
                st.paired_times(last, first, steps), "higher"))
    return found


def _char_lm(rows, arms, baseline, _):
    tuned, notes = tables.tune(rows, "final_loss", over="lr", by=("d_k",))
    made = [
        tables.ablation_table(rows, "final_loss", baseline, by=("d_k", "lr"), arms=arms,
                              title="Character language model: held-out loss",
                              label="loss (nats per character)"),
        tables.ablation_table(tuned, "final_loss", baseline, by=("d_k",), show=("lr",), arms=arms,
                              title="Character language model at each arm's best learning rate",
                              label="loss (nats per character)", notes=tuple(notes)),
        _layers(rows),
    ]
    drawn = [figures.lines(rows, "final_loss", "lr", name="lm_lr", panel="d_k", arms=arms,
                           ylabel="held-out loss (nats per character)", xlabel="learning rate",
                           title="Character language model: loss against learning rate")]
    wide, found = max(r["axes"]["d_k"] for r in rows), []
    first, last = (_pick(tuned, arm, "final_loss", d_k=wide) for arm in (baseline, "dot"))
    if first and last:
        found.append(Claim(
            f"On text, unscaled attention ends at a higher loss than scaled, each at its best "
            f"learning rate, d_k={wide} (Vaswani et al. 2017, 3.2.1)", st.paired(last, first),
            "higher"))
    return found, made, drawn


def _layers(rows: list[Row]) -> Table:
    """Attention statistics of every layer after training."""
    shown = (("logit_variance", "logit variance"), ("largest_logit", "largest |logit|"),
             ("entropy", "entropy (nats)"), ("saturated", "rows > .99"),
             ("gradient_q", "gradient norm of W_q"))
    lines = []
    for group, by_arm in tables.split(rows, ("d_k", "lr")).items():
        for arm, members in by_arm.items():
            for layer in range(len(members[0]["metrics"]["entropy"])):
                lines.append((arm, *(f"{v:g}" for _, v in group), str(layer), *(
                    tables.number(float(np.mean([r["metrics"][m][layer] for r in members])))
                    for m, _ in shown)))
    return Table("Character language model: attention by layer after training",
                 ("arm", "d_k", "lr", "layer", *(label for _, label in shown)), tuple(lines),
                 caption="Means over seeds, on held-out text.")


def _training_curves(rows, arms, stride, ylabel, name, title):
    wide = max(r["axes"]["d_k"] for r in rows)
    series: dict[str, dict[str, list]] = {}
    for ((_, lr),), by_arm in tables.split([r for r in rows if r["axes"]["d_k"] == wide],
                                           ("lr",)).items():
        series[f"lr = {lr:g}"] = {arm: [r["metrics"]["curve"] for r in members]
                                  for arm, members in by_arm.items()}
    length = len(rows[0]["metrics"]["curve"])
    return figures.curves(series, name=name, title=title, arms=arms, xlabel="step", ylabel=ylabel,
                          x=[stride * (i + 1) for i in range(length)],
                          caption=f"d_k = {wide}; mean over seeds with 95 % CI.")
