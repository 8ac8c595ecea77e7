"""What the probes say: exact match within and beyond the training lengths, ranks and claims.

Published: Kazemnejad et al. 2023, decoders of 107 M parameters trained on lengths up to 20 and
tested up to 40, 3 seeds; mean reciprocal rank over 10 tasks as in `PUBLISHED`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments._extrapolation_settings import Settings
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.tables import Table
from tx_jax.study.verdicts import Claim

Row = dict[str, Any]
Found = tuple[list[Claim], list[Table], list[figures.Figure]]
PUBLISHED = {"none": 0.69, "t5": 0.55, "alibi": 0.50, "rope": 0.33, "sinusoidal": 0.22}
_PAPER = "Kazemnejad et al. 2023"
NOTES = (
    "Probes: an answer counts if free-running greedy decoding emits it and END without a mistake. "
    "Prompts of short lengths may have occurred in training, those beyond never; ranks and claims "
    "read the lengths beyond.",
    "Probes: the learning rate of an arm is chosen by exact match within the training lengths, "
    "never by what is compared.",
    "Probes: a scheme that has not solved a task within the training lengths cannot say whether "
    "it extrapolates: read its line as a lower bound, and raise --probes.steps. Claims on a single "
    "task leave out schemes of which no more than half of the seeds solved it.",
    "Probes: T5 gives each of the first 16 distances a bucket of its own. In shorter rows no "
    "bucket is shared between distances of training and longer ones, as it is at the lengths of "
    "the paper (--probes.train_length=20); t5(buckets=8, max_distance=16) shares earlier.",
    "Probes: models of this size cannot show how far those of 107 M parameters extrapolate, nor "
    "an order among schemes that all fail; ties share their mean rank.")


def probes(settings: Settings, rows: list[Row]) -> Found:
    """Claims, tables and figures of the part `probes`."""
    own = settings.probes
    return make_probes(rows, own.train_length, own.arms, own.steps)


def make_probes(rows: list[Row], train_length: int, arms: Sequence[str], steps: int
                ) -> Found:
    """`probes` without its settings; arms give the order of lines and colours."""
    tuned, notes = tables.tune(rows, "within", over="lr", by=("task",), lower_is_better=False)
    lengths = sorted(map(int, tuned[0]["metrics"]["exact"]))  # a ledger sorts them as words
    found = [_exact_table(tuned, train_length, arms, lengths, notes)]
    ranks = reciprocal_ranks(tuned)
    if len(ranks) > 1:
        found.append(_rank_table(ranks, arms, sorted({r["axes"]["task"] for r in tuned})))
    found.append(tables.times_table(
        tuned, "steps_to_90", steps, _base(ranks), by=("task",), show=("lr",), arms=arms,
        title="Probes: steps until 90 % of a fresh training batch are exact",
        label="steps to 90 %", caption=f"Median [range] over seeds; runs last {steps} steps. "
        "Training lengths only."))
    return _claims(tuned, train_length, ranks), found, [_figure(tuned, train_length, arms, lengths)]


def reciprocal_ranks(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """arm -> seed -> mean over tasks of 1 / rank by exact match beyond the training lengths.

    Ranks are taken within a task and seed, 1 for the best; equal arms share the mean of their
    ranks. Only seeds that all arms and tasks have.
    """
    score: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        good = row["status"] != "diverged"
        score.setdefault((row["axes"]["task"], row["seed"]), {})[row["arm"]] = (
            row["metrics"]["beyond"] if good else -1.0)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    tasks = {row["axes"]["task"] for row in rows}
    seeds = [s for s in sorted({row["seed"] for row in rows})
             if all(len(score.get((t, s), {})) == len(arms) for t in tasks)]
    found: dict[str, dict[int, float]] = {arm: {} for arm in arms}
    for seed in seeds:
        ranks_TA = [stats.rankdata([-score[t, seed][a] for a in arms]) for t in tasks]
        for arm, mean in zip(arms, (1 / np.array(ranks_TA)).mean(axis=0), strict=True):
            found[arm][seed] = float(mean)
    return found


def _base(arms: Mapping[str, Any]) -> str:
    return "none" if "none" in arms else next(iter(arms))


def _interval(found: Sequence[float]) -> str:
    return tables.interval(st.summarize(list(found), bootstrap=0))


def _exact(rows: Sequence[Row], length: int) -> dict[int, float]:
    """seed -> share of exact answers at a length; NaN for a diverged seed."""
    return {row["seed"]: row["metrics"]["exact"][str(length)]
            if row["status"] != "diverged" else float("nan") for row in rows}


def _exact_table(rows: Sequence[Row], train_length: int, arms: Sequence[str],
                 lengths: Sequence[int], notes: Sequence[str]) -> Table:
    lines, commands = [], []
    for ((_, task),), by_arm in tables.split(rows, ("task",)).items():
        for arm in [a for a in arms if a in by_arm]:
            members = by_arm[arm]
            solved = _count(members)
            low, high = st.wilson(solved, len(members))
            lines.append((task, arm, f"{members[0]['axes']['lr']:g}",
                          f"{solved}/{len(members)} [{low:.2f}, {high:.2f}]",
                          *(_interval(_exact(members, n).values()) for n in lengths)))
            commands += [(f"{task} {arm} seed={r['seed']}", r["command"])
                         for r in members if "command" in r]
    columns = ("task", "arm", "lr", "solved within", *(
        f"n={n}" + (" (beyond)" if n > train_length else "") for n in lengths))
    return Table(f"Probes: exact match by length, trained on lengths 1 to {train_length}", columns,
                 tuple(lines), notes=tuple(notes), commands=tuple(commands),
                 caption="Mean over seeds with 95 % t-interval, which may pass 0 or 1. Solved: at "
                         "least 95 % exact at every test length within the training lengths, with "
                         "Wilson's interval.")


def _rank_table(ranks: Mapping[str, Mapping[int, float]], arms: Sequence[str],
                tasks: Sequence[str]) -> Table:
    base = _base(ranks)
    versus = st.holm({a: st.paired(v, ranks[base]) for a, v in ranks.items() if a != base})
    lines = []
    for arm in [a for a in arms if a in ranks]:
        c = versus.get(arm)
        lines.append((arm, _interval(list(ranks[arm].values())),
                      tables.number(PUBLISHED[arm]) if arm in PUBLISHED else "–",
                      "–" if c is None or c.n == 0 else f"{c.difference:+.2g}",
                      tables.p_value(c.adjusted) if c else "–", str(len(ranks[arm]))))
    return Table("Probes: mean reciprocal rank", (
        "arm", "here", f"{_PAPER}, 10 tasks", f"difference to {base}", "p (Holm)", "seeds"),
        tuple(lines), caption=f"Over the tasks {', '.join(tasks)}; within a task and seed, schemes "
        "are ranked by exact match averaged over the lengths beyond training. With other tasks and "
        "schemes than the paper's, the numbers compare in order only.")


def _figure(rows: Sequence[Row], train_length: int, arms: Sequence[str], lengths: Sequence[int]
            ) -> figures.Figure:
    series: dict[str, dict[str, list]] = {}
    for ((_, task),), by_arm in tables.split(rows, ("task",)).items():
        series[task] = {arm: [list(_exact([r], n).values())[0] for r in members for n in lengths]
                        for arm, members in by_arm.items()}
        series[task] = {arm: np.reshape(v, (-1, len(lengths))).tolist()
                        for arm, v in series[task].items()}
    return figures.curves(
        series, name="probes", title="Probes: exact match against length", x=lengths, arms=arms,
        xlabel="length n", ylabel="exact match", mark=train_length, ylim=(-0.04, 1.04),
        caption="Mean over seeds with 95 % CI, cut at 0 and 1. The dotted line is the longest "
                f"training length, {train_length}.")


def _claims(rows: Sequence[Row], train_length: int, ranks: Mapping[str, Mapping[int, float]]
            ) -> list[Claim]:
    """Few on purpose: every claim raises the corrected p of all others."""
    claims = []
    for better, worse in (("none", "rope"), ("t5", "rope"), ("alibi", "rope")):
        if better in ranks and worse in ranks:
            claims.append(Claim(
                f"{better} ranks above {worse} over the tasks ({_PAPER}: mean reciprocal rank "
                f"{PUBLISHED[better]:.2f} against {PUBLISHED[worse]:.2f})",
                st.paired(ranks[better], ranks[worse]), "higher"))
    by_task = {group[0][1]: arms for group, arms in tables.split(rows, ("task",)).items()}
    for task in [t for t in ("copy", "reverse") if t in by_task]:
        claims += _order_claims(task, by_task[task], train_length)
    if "addition" in by_task:
        claims += _addition_claims(by_task["addition"], train_length)
    return claims


def _order_claims(task: str, by_arm: Mapping[str, list[Row]], train_length: int) -> list[Claim]:
    """NoPE and T5 hold past the training lengths, ALiBi less, rotary and sinusoidal not at all.

    Only schemes that most seeds taught the training lengths: others have nothing to extrapolate.
    """
    claims, by_arm = [], {arm: rows for arm, rows in by_arm.items() if _taught(rows)}
    for better, worse in (("none", "alibi"), ("t5", "alibi"), ("none", "rope"), ("t5", "rope")):
        if better in by_arm and worse in by_arm:
            a, b = by_arm[better], by_arm[worse]
            claims.append(Claim(
                f"{task}: {better} extrapolates further than {worse} ({_PAPER}, copy and reverse): "
                f"exact match beyond training; solved within by {_solved(a)} and {_solved(b)} "
                "seeds", st.paired(tables.values(a, "beyond"), tables.values(b, "beyond")),
                "higher"))
    for arm in [a for a in ("rope", "sinusoidal") if a in by_arm]:
        first = min(n for n in map(int, by_arm[arm][0]["metrics"]["exact"]) if n > train_length)
        found = _exact(by_arm[arm], first)
        claims.append(Claim(
            f"{task}: {arm} fails at once ({_PAPER}; 5 % allowed): exact match at length {first}, "
            f"trained to {train_length}; solved within by {_solved(by_arm[arm])} seeds",
            st.paired(found, dict.fromkeys(found, 0.0)), "equal", margin=0.05))
    return claims


def _addition_claims(by_arm: Mapping[str, list[Row]], train_length: int) -> list[Claim]:
    claims = []
    for arm, members in by_arm.items():
        if not _taught(members):
            continue
        far = sorted(n for n in map(int, members[0]["metrics"]["exact"]) if n >= 2 * train_length)
        if far:
            found = _exact(members, far[0])
            claims.append(Claim(
                f"addition: {arm} does not extrapolate far ({_PAPER}: nobody does; 5 % allowed): "
                f"exact match at {far[0]} digits; solved within by {_solved(members)} seeds",
                st.paired(found, dict.fromkeys(found, 0.0)), "equal", margin=0.05))
    return claims


def _taught(rows: Sequence[Row]) -> bool:
    return 2 * _count(rows) > len(rows)


def _solved(rows: Sequence[Row]) -> str:
    return f"{_count(rows)}/{len(rows)}"


def _count(rows: Sequence[Row]) -> int:
    """Seeds that solved their task; a diverged one did not."""
    return sum(value == 1 for value in tables.values(rows, "solved").values())
