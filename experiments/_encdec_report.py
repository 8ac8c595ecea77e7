"""What the study of architectures says: budgets, claims, tables and figures."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments._encdec_settings import ARMS, BASE, CHUNK, Settings
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.report import Report, run_facts
from tx_jax.study.tables import Table, number
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]
_T5 = "Raffel et al. 2020, table 2"
# (better, worse, what is claimed). T5 compared a pair of 2 P parameters with decoders of P that
# take as many operations, and a shared pair of P with them; no decoder of 2 P. The task that nobody
# solves at once shows the order in time, the others in the early loss.
ORDER = (("encdec", "prefix_flops", f"encoder-decoder before prefix ({_T5})"),
         ("encdec", "causal_flops", f"encoder-decoder before causal ({_T5})"),
         ("prefix_flops", "causal_flops", f"prefix before causal ({_T5})"),
         ("encdec_shared", "prefix_flops", f"shared encoder-decoder before prefix ({_T5})"),
         ("encdec", "prefix", "our expectation, encoder-decoder before prefix"),
         ("prefix", "causal", "our expectation, prefix before causal"))


def make_report(settings: Settings, rows: list[Row]) -> Report:
    """The report; times are steps until 90 % of freshly drawn rows are exact."""
    tuned, notes = tables.tune(rows, "mean_loss", over="lr", by=("task",))
    base = BASE if any(r["arm"] == BASE for r in rows) else rows[0]["arm"]
    arms, limits = tuple(ARMS), settings.steps
    made = [_budgets(settings),
            tables.times_table(
                tuned, "steps_to_90", limits, base, by=("task",), show=("lr",), arms=arms,
                title="Steps until 90 % of freshly drawn rows are exact", label="steps to 90 %",
                notes=notes, caption=f"Median [range] over seeds; runs last {limits} steps. An "
                "answer is exact if greedy decoding gives it without a mistake; one batch of "
                f"{settings.batch} rows is looked at every {CHUNK} steps. {_overlap(settings)}"),
            tables.ablation_table(
                tuned, "early_loss", base, by=("task",), show=("lr",), arms=arms,
                title=f"Loss around step {settings.early}", label="nats per target token",
                caption=f"Mean over the {CHUNK} steps before.")]
    if len(settings.lrs) > 1:
        made.append(tables.ablation_table(
            rows, "mean_loss", base, by=("task", "lr"), arms=arms,
            title="Loss over the whole run by learning rate", label="nats per target token",
            caption="The smallest mean is kept."))
    claims = _claims(tuned, settings)
    return Report(
        "Encoder-decoder against decoder-only",
        ("The same sequence tasks for every shape, with the loss on the target alone. Equal seeds "
         "see the same rows in the same order. A pair of an encoder and a decoder is compared with "
         "decoders of as many parameters and with decoders of as many operations: both at once "
         "cannot be, as every token passes all layers of a decoder and half of those of a pair.",),
        verdicts=judge_all(claims), tables=tuple(made), figures=(_figure(settings, tuned),),
        notes=("A run of this size cannot show zero-shot accuracy, the effect of instruction "
               "tuning, translation quality or scaling: not resolvable at this size. T5 compared "
               "pre-trained models of 220 M and 2 x 220 M parameters after fine-tuning; here the "
               "question is only how soon a shape learns a task that depends on the whole source.",
               "The learning rate of an arm and task is chosen by its loss over the whole run.",
               f"p-values of the {len(claims)} claims are corrected by Holm over them, those of a "
               "table within its groups."),
        facts=run_facts(rows))


def _overlap(settings: Settings) -> str:
    """How many of the rows looked at may have been trained on."""
    sources = settings.symbols**settings.length
    share = -math.expm1(-settings.steps * settings.batch / sources)
    return (f"Of {sources} possible sources a run draws {settings.steps * settings.batch}, so at "
            f"its end {share:.0%} of those looked at had been trained on.")


def _budgets(settings: Settings) -> Table:
    lines, base = [], settings.budget(BASE)
    for arm in settings.arms:
        found = settings.budget(arm)
        depth, own = settings.layers_of(arm), ARMS[arm]
        lines.append((arm, f"{depth} + {depth}" if own.encoder else str(depth),
                      own.matched or "–", str(found.parameters),
                      f"{found.layers / base.layers:.2f}", number(found.training),
                      f"{found.training / base.training:.2f}", *_decoding(settings, arm)))
    n = settings.length
    return Table("Budgets", (
        "arm", "layers", "matched", "parameters", "of its layers / pair", "training FLOPs a pair",
        "/ pair", "cached numbers a row", "products a new token"), tuple(lines),
        caption=f"Source and target of {n} tokens; operations counted from the program up to the "
        "logits. Depths are whole numbers, so a match is as near as the ratios say. In "
        "decoding, a pair keeps keys and values of the source for each layer of its decoder, a "
        "decoder alone those of both for all its layers. Products: weights of the layers that a "
        "new token is multiplied by.")


def _decoding(settings: Settings, arm: str) -> tuple[str, str]:
    """Numbers in the cache of a whole pair, and weights that a new token meets."""
    depth, n, width = settings.layers_of(arm), settings.length, settings.d_model
    cached = 2 * depth * width * 2 * n
    # With an encoder: its own attention and MLP, and queries and output of the one over the source.
    weights = depth * ((6 if ARMS[arm].encoder else 4) * width**2 + 8 * width**2)
    return str(cached), str(weights)


def _claims(rows: Sequence[Row], settings: Settings) -> list[Claim]:
    """T5's order at equal parameters and at equal operations."""
    found = []
    for ((_, task),), by_arm in tables.split(rows, ("task",)).items():
        for better, worse, text in ORDER:
            if better not in by_arm or worse not in by_arm:
                continue
            costs = [settings.budget(arm) for arm in (better, worse)]
            ratio = (f"{costs[0].layers / costs[1].layers:.2f} of the parameters, "
                     f"{costs[0].training / costs[1].training:.2f} of the operations")
            if task == "shift":
                c = st.paired_times(tables.values(by_arm[better], "steps_to_90"),
                                    tables.values(by_arm[worse], "steps_to_90"), settings.steps)
                measure = "steps to 90 %"
            else:
                c = st.paired(tables.values(by_arm[better], "early_loss"),
                              tables.values(by_arm[worse], "early_loss"))
                measure = f"loss around step {settings.early}"
            found.append(Claim(
                f"{task}, {text}: {measure} of {better} ({ratio}) against {worse}", c, "lower"))
    return found


def _figure(settings: Settings, rows: Sequence[Row]) -> figures.Figure:
    chunks = settings.steps // CHUNK
    series: dict[str, dict[str, list[list[float]]]] = {}
    for ((_, task),), by_arm in tables.split(rows, ("task",)).items():
        series[task] = {arm: [_filled(r["metrics"]["curve"], chunks) for r in members]
                        for arm, members in by_arm.items()}
    return figures.curves(
        series, name="sequences", title="Exact rows against training steps", arms=tuple(ARMS),
        x=(np.arange(chunks) + 1) * CHUNK, xlabel="step", ylabel="exact rows",
        ylim=(-0.04, 1.04), caption="Mean over seeds with 95 % CI, cut at 0 and 1, at the best "
        "learning rate of each arm. A run that ended when it was solved counts with its last "
        "share.")


def _filled(curve: list[float], chunks: int) -> list[float]:
    return [*curve, *[curve[-1]] * (chunks - len(curve))]
