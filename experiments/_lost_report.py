"""What the study of needles says: claims, tables and figures from ledger rows alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments._needles import depth_weights, shape_of_curve
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.report import Report, run_facts
from tx_jax.study.tables import Table
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]
BY = ("regime", "items")
TRAINED = {"uniform": "anywhere", "ends": "near both ends", "recent": "near the end"}
# Differences of accuracy up to this size count as none where a claim says that there is none.
MARGIN = 0.05


def make_report(rows: list[Row], *, arms: Sequence[str], chance: float) -> Report:
    """The report; the first arm is the one that the others are compared with."""
    reference = next(arm for arm in arms if any(r["arm"] == arm for r in rows))
    tuned, notes = tables.tune(rows, "final_loss", over="lr", by=BY)
    claims = _claims(tuned, arms, reference)
    made = [_positions(tuned, arms, chance), _shapes(tuned, arms), _demand(tuned),
            tables.ablation_table(
                tuned, "middle", reference, by=BY, show=("lr",), arms=arms,
                lower_is_better=False, title="Accuracy in the middle third: do arms differ?",
                label="accuracy in the middle", notes=notes),
            _distractors(tuned, arms), _time_course(tuned, arms)]
    if len({r["axes"]["lr"] for r in rows}) > 1:
        made.append(tables.ablation_table(
            rows, "final_loss", reference, by=(*BY, "lr"), arms=arms,
            title="Training loss by learning rate", label="loss (nats), last 50 steps",
            caption="On fresh prompts of the regime, apart from the test prompts; the smallest "
                    "mean is kept."))
    return Report(
        "Lost in the middle",
        ("A decoder reads n items, each a key with a value, and a query; it answers with the value "
         "of the queried key, the needle. Arms share initial parameters where shapes allow, all "
         "training items and all test prompts; regimes differ in one thing only, how often "
         "training asks at each depth. The same test questions are asked with the needle moved to "
         "every depth.",
         "Read the first figure by panel: panels are demands of training, lines are arms. The "
         "curves also depend on when they are read, which is why every evaluation of the run is "
         "shown. Among more items than in training, 'first' is a distance that was never asked "
         "for, and what was the first distance in training now lies inside the prompt."),
        verdicts=judge_all(claims), tables=tuple(made), figures=tuple(_figures(tuned, arms,
                                                                               reference)),
        notes=("A run of this size cannot show the U of natural pre-training (Liu et al. see "
               "recency alone in Llama-2 7B and a U from 13B on), distraction by the meaning of "
               "documents, or the effect of instruction tuning. It shows what a demand of training "
               "does to an architecture that could learn every depth.",
               "Middle: the middle third of the depths. Ends: the mean of the first and the last. "
               "Claims are about the end of training. The small recipe (n, steps, widths) was "
               "chosen on pilot runs with seed 0, which is also one of these seeds.",
               f"Intervals are 95 % t-intervals over seeds; every seed has its own test prompts, "
               f"so they hold the sampling of prompts too. p-values of the {len(claims)} claims "
               "are corrected by Holm over them, those of a table within its groups.",
               f"Chance is {chance:.3f}. Fewer items than in training are as new to the model as "
               "more are: in both the query stands where none stood before."),
        facts=run_facts(rows))


def _lines(rows: list[Row], arms: Sequence[str]) -> list[tuple[str, int, str, list[Row]]]:
    """(regime, n, arm, rows of all seeds), in the order of regimes, n and `arms`."""
    found = tables.split(rows, BY)
    order = sorted(found, key=lambda g: (list(TRAINED).index(g[0][1]), g[1][1]))
    return [(g[0][1], g[1][1], arm, found[g][arm]) for g in order for arm in arms
            if arm in found[g]]


def _said(rows: list[Row], number: Callable[[dict[str, Any]], float]) -> str:
    """Mean over seeds with its interval of a number made of a row's metrics."""
    found = [float(number(r["metrics"])) if _sound(r) else math.nan for r in rows]
    return tables.interval(st.summarize(found, bootstrap=0))


def _sound(row: dict[str, Any]) -> bool:
    """Whether the run did not diverge; one that did is counted and enters no mean."""
    return row["status"] != "diverged"


def _curves(rows: list[Row], curve: Callable[[dict[str, Any]], Any]) -> np.ndarray:
    """A curve of each row's metrics, [rows, depths], NaN where the run diverged."""
    return np.array([np.asarray(curve(r["metrics"]), np.float64) * (1 if _sound(r) else math.nan)
                     for r in rows])


def _quarters(count: int) -> list[int]:
    """Indices of the first, middle and last of `count` depths, and of those half way between."""
    return [round(float(i)) for i in np.linspace(0, count - 1, 5)]


def _positions(rows, arms, chance):
    lines, commands = [], []
    for regime, n, arm, members in _lines(rows, arms):
        curve = _curves(members, lambda m: m["by_step"][-1])
        at = [tables.interval(st.summarize(curve[:, i], bootstrap=0))
              for i in _quarters(curve.shape[1])]
        lines.append((TRAINED[regime], str(n), arm, *at, _said(members, lambda m: m["without"]),
                      _said(members, lambda m: m["alone"])))
        commands += [(f"{arm} {regime} n={n} seed={r['seed']}", r["command"]) for r in members
                     if "command" in r]
    return Table("Accuracy by position of the needle",
                 ("trained on needles", "n", "arm", "first", "1/4", "middle", "3/4", "last",
                  "no needle", "needle alone"), tuple(lines), commands=tuple(commands),
                 caption="Mean over seeds with 95 % CI, at the end of training. 'No needle' is the "
                         f"closed book of Liu et al., another item in its place (chance is "
                         f"{chance:.3f}); 'needle alone' their oracle, at a length not trained on.")


def _demand(rows):
    """How often training asks at each depth."""
    lines = []
    for regime, n in sorted({(r["axes"]["regime"], r["axes"]["items"]) for r in rows},
                            key=lambda pair: (list(TRAINED).index(pair[0]), pair[1])):
        share = depth_weights(regime, n)
        lines.append((TRAINED[regime], str(n), *(f"{share[i]:.2g}" for i in _quarters(n))))
    return Table("Where training asks", ("trained on needles", "n", "first", "1/4", "middle",
                                         "3/4", "last"), tuple(lines),
                 caption="Share of the training prompts that ask for the item at that depth.")


def _shapes(rows, arms):
    names = ("middle_against_ends", "primacy", "recency")
    lines = []
    for regime, n, arm, members in _lines(rows, arms):
        own = [tables.values(members, name) for name in names]
        tests = st.holm({i: st.paired(v, dict.fromkeys(v, 0.0)) for i, v in enumerate(own)})
        lines.append((TRAINED[regime], str(n), arm, *(
            text for i, v in enumerate(own) for text in
            (tables.interval(st.summarize(list(v.values()), bootstrap=0)),
             tables.p_value(tests[i].adjusted)))))
    return Table("Shape of the curve",
                 ("trained on needles", "n", "arm", "middle - ends", "p", "first - middle", "p",
                  "last - middle", "p"), tuple(lines),
                 caption="Differences of accuracy within a run; p against 0, corrected by Holm "
                         "over the three of a line.")


def _mean_at(metrics: dict[str, Any], n: int) -> float:
    """Mean accuracy over five depths at n items."""
    curve = metrics["by_items"][str(n)]["accuracy"]
    return float(np.mean([curve[i] for i in _quarters(len(curve))]))


def _lengths(rows: Sequence[Row]) -> list[int]:
    return sorted(int(n) for n in rows[0]["metrics"]["by_items"])


def _distractors(rows, arms):
    lines = []
    for regime, n, arm, members in _lines(rows, arms):
        for m in _lengths(members):
            curves = _curves(members, lambda x, m=m: x["by_items"][str(m)]["accuracy"])
            lines.append((TRAINED[regime], str(n), arm, str(m),
                          _said(members, lambda x, m=m: _mean_at(x, m)), *(
                tables.interval(st.summarize(curves[:, i], bootstrap=0))
                for i in _quarters(curves.shape[1]))))
    return Table("Accuracy by number of items",
                 ("trained on needles", "trained n", "arm", "n", "mean", "first", "1/4", "middle",
                  "3/4", "last"), tuple(lines),
                 caption="The needle and n - 1 distractors, after training on 'trained n' alone; "
                         "mean of the five depths shown.")


def _time_course(rows, arms):
    steps, lines = rows[0]["metrics"]["steps"], []
    for regime, n, arm, members in _lines(rows, arms):
        entries = []
        for i in range(len(steps)):
            curves = _curves(members, lambda x, i=i: x["by_step"][i])
            entries += [tables.interval(st.summarize(curves.mean(axis=1), bootstrap=0)),
                        tables.interval(st.summarize(
                            [shape_of_curve(c)["middle_against_ends"] for c in curves],
                            bootstrap=0))]
        lines.append((TRAINED[regime], str(n), arm, *entries))
    columns = [text for s in steps for text in (f"step {s}: mean", "middle - ends")]
    return Table("Accuracy on the way", ("trained on needles", "n", "arm", *columns), tuple(lines),
                 caption="Mean over all depths, and middle against ends, at every evaluation.")


def _claims(rows, arms, reference):
    found = []
    n = min(r["axes"]["items"] for r in rows)

    def pick(arm: str, regime: str) -> list[Row]:
        return [r for r in rows if r["arm"] == arm and r["axes"]["regime"] == regime
                and r["axes"]["items"] == n]

    def shape(text: str, arm: str, regime: str, metric: str, expected: str,
              margin: float = 0.0) -> None:
        if members := pick(arm, regime):
            seen = tables.values(members, metric)
            found.append(Claim(f"{text}: {arm}, n={n}, trained on needles {TRAINED[regime]}",
                               st.paired(seen, dict.fromkeys(seen, 0.0)), expected, margin))

    for regime in TRAINED:
        shape("The middle is answered worse than the ends (Liu et al. 2023, figure 5)",
              reference, regime, "middle_against_ends", "lower")
    shape("The null: depth makes no difference beyond 5 points, middle against ends", reference,
          "uniform", "middle_against_ends", "equal", MARGIN)
    shape("Uniform demand gives primacy, first against middle (Salvatore et al. 2025)", reference,
          "uniform", "primacy", "higher")
    shape("Recent demand gives recency, last against middle (Salvatore et al. 2025)", reference,
          "recent", "recency", "higher")
    shape("Both demands give primacy, first against middle (Salvatore et al. 2025)", reference,
          "ends", "primacy", "higher")
    shape("Both demands give recency, last against middle (Salvatore et al. 2025)", reference,
          "ends", "recency", "higher")
    for arm in arms:
        if arm not in (reference, "query_first", "prefix"):
            shape("Both demands give a U, middle against ends (Salvatore et al. 2025, of models of "
                  "the types of GPT-2 and Llama)", arm, "ends", "middle_against_ends", "lower")
    if members := pick(reference, "uniform"):
        for fewer, more in zip(_lengths(members)[:-1], _lengths(members)[1:], strict=True):
            low, high = ({r["seed"]: _mean_at(r["metrics"], m) if _sound(r) else math.nan
                          for r in members} for m in (fewer, more))
            found.append(Claim(
                f"Accuracy falls with the number of distractors (Liu et al. 2023, figure 5), n="
                f"{more} against {fewer}: {reference}, trained at n={n} on needles anywhere",
                st.paired(high, low), "lower"))
    asked_twice, once = pick("query_first", "ends"), pick("rope", "ends")
    if asked_twice and once:
        found.append(Claim(
            "The query before the items too lifts the middle (Liu et al. 2023, 4.2): middle "
            f"against ends, query_first against rope, n={n}, trained on needles near both ends",
            st.paired(tables.values(asked_twice, "middle_against_ends"),
                      tables.values(once, "middle_against_ends")), "higher"))
    return found


def _figures(rows, arms, reference):
    drawn = []
    for n in sorted({r["axes"]["items"] for r in rows}):
        here = [r for r in rows if r["axes"]["items"] == n]
        series: dict[str, dict[str, dict[str, list]]] = {"positions": {}, "distractors": {},
                                                         "steps": {}}
        steps = [f"step {s}" for s in here[0]["metrics"]["steps"]]
        for regime, _, arm, members in _lines(here, arms):
            where = f"trained on needles {TRAINED[regime]}"
            members = [r for r in members if _sound(r)]
            curves = [r["metrics"]["by_step"] for r in members]
            series["positions"].setdefault(where, {})[arm] = [c[-1] for c in curves]
            for m in _lengths(members):
                found = [r["metrics"]["by_items"][str(m)]["accuracy"] for r in members]
                series["distractors"].setdefault(f"{TRAINED[regime]}, n = {m}", {})[arm] = [
                    [c[i] for i in _quarters(len(c))] for c in found]
            if arm == reference:
                series["steps"][where] = {s: [c[i] for c in curves] for i, s in enumerate(steps)}
        depths = len(here[0]["metrics"]["by_step"][0])
        common = {"xlabel": "position of the needle, 0 = first", "ylabel": "accuracy"}
        drawn += [
            figures.curves(series["positions"], name=f"lost_positions_{n}", arms=arms,
                           x=np.linspace(0, 1, depths).tolist(), **common,
                           title=f"Accuracy against position among {n} items, as trained",
                           caption="Liu et al.'s figure, by what training asked for. Mean over "
                                   "seeds with 95 % CI, at the end of training."),
            figures.curves(series["distractors"], name=f"lost_distractors_{n}", arms=arms,
                           x=np.linspace(0, 1, 5).tolist(), **common,
                           title=f"Fewer and more distractors, trained among {n} items",
                           caption="A row per regime, a column per number of items in the prompt."),
            figures.curves(series["steps"], name=f"lost_steps_{n}", arms=steps,
                           x=np.linspace(0, 1, depths).tolist(), **common,
                           title=f"When it is read matters: {reference}, {n} items",
                           caption="The evaluations of one training run, one line each.")]
    return drawn
