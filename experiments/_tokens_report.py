"""What the study of tokenizers says: claims, tables and a figure from ledger rows alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.report import Report, run_facts
from tx_jax.study.tables import Table, number
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]
_SENNRICH = "Sennrich et al. 2016"


def make_report(rows: list[Row], arms: Sequence[str], reference: str) -> Report:
    """The report; differences are to `reference`."""
    tuned, notes = tables.tune(rows, "tuning", over="lr", by=("budget",))
    base = reference if reference in {r["arm"] for r in rows} else rows[0]["arm"]
    claims = _claims(tuned, arms)
    made = [_what(tuned, arms)]
    made += [tables.ablation_table(
        tuned, metric, base, by=("budget",), show=("lr",), arms=arms, title=title, label=label,
        notes=notes if metric == "bpb" else (), caption=caption) for metric, title, label, caption
        in (("bpb", "Bits per byte", "bits per byte", "Unknown words are spelled, see the notes."),
            ("bpb_free", "Bits per byte while unknown words are free", "bits per byte",
             "Not a comparison: what a closed vocabulary cannot say costs it nothing here."),
            ("perplexity", "Perplexity of a token", "perplexity",
             "Not comparable between tokenizers: it is here to show that."))]
    return Report(
        "Tokenizers",
        ("Characters, subwords and words on the same text: every model reads rows of the same "
         "bytes. Under the budget `bytes` all train on equally many bytes; under `flops` on as "
         "many as the operations of the reference buy.",),
        verdicts=judge_all(claims), tables=tuple(made), figures=tuple(_figures(tuned, arms)),
        notes=("Bits per byte are nats over ln 2 over UTF-8 bytes, of the same characters for "
               "every tokenizer, read in windows side by side.",
               "An unknown word is spelled with the frequencies of characters in the words that "
               "are unknown in the training text, its end included; a better speller would make "
               "it cheaper.",
               "Vocabularies are learnt from the training text. Subwords of bytes and characters "
               "of this text have no unknown pieces.",
               "A run of this size cannot show translation quality, the best vocabulary at scale "
               "(it grows with the data), or gains in languages with many word forms: not "
               "resolvable at this size.",
               "The learning rate of an arm is chosen on the other half of the held-out text.",
               f"p-values of the {len(claims)} claims are corrected by Holm over them, those of a "
               "table within its groups."),
        facts=run_facts(rows))


def _what(rows: Sequence[Row], arms: Sequence[str]) -> Table:
    lines = []
    for group, by_arm in tables.split(rows, ("budget",)).items():
        for arm in [a for a in arms if a in by_arm]:
            m = by_arm[arm][0]["metrics"]
            lines.append((arm, group[0][1], str(m["vocabulary"]), f"{m['unknown']:.2%}",
                          number(m["characters_per_token"], digits=3), str(m["context"]),
                          str(m["parameters"]), f"{1 - m['layers'] / m['parameters']:.0%}",
                          number(m["flops_per_byte"], digits=3), str(m["steps"])))
    return Table("The tokenizers", (
        "arm", "budget", "vocabulary", "unknown tokens", "characters per token",
        "tokens of context", "parameters", "in the vocabulary's tables", "FLOPs a byte", "steps"),
        tuple(lines), caption="Unknown tokens and characters per token on the scored text, which "
        "no vocabulary has seen. Operations of training, counted from the program.")


def _claims(rows: Sequence[Row], arms: Sequence[str]) -> list[Claim]:
    found: list[Claim] = []
    for ((_, budget),), by_arm in tables.split(rows, ("budget",)).items():
        seen = {arm: by_arm[arm] for arm in arms if arm in by_arm}
        bpe = sorted((a for a in seen if a.startswith("bpe")), key=lambda a: _size(seen, a))
        words = [a for a in seen if a.startswith("word")]

        def claim(text: str, a: str, b: str, expected: str, metric: str = "bpb", seen=seen,
                  budget=budget) -> None:
            found.append(Claim(f"{text}: {a} against {b}, equal {budget}", st.paired(
                _values(seen[a], metric), _values(seen[b], metric)), expected))

        middle = bpe[len(bpe) // 2] if bpe else None
        if middle and "char" in seen:
            claim("Subwords take fewer bits than characters", middle, "char", "lower")
        if len(bpe) > 2:
            claim("The largest subword vocabulary is not the best (Ding et al. 2019, in kind)",
                  bpe[-1], middle, "higher")
        if bpe and "char" in seen and budget == "bytes":
            claim("Perplexity of a token rises with the vocabulary", bpe[-1], "char", "higher",
                  "perplexity")
        if middle and words:
            claim("Words look better while unknown ones are free", words[0], middle, "lower",
                  "bpb_free")
            claim(f"With unknown words spelled, subwords are better ({_SENNRICH}, in kind)",
                  middle, words[0], "lower")
    return found


def _size(seen: Mapping[str, Sequence[Row]], arm: str) -> int:
    return seen[arm][0]["metrics"]["vocabulary"]


def _values(rows: Sequence[Row], metric: str) -> dict[int, float]:
    found = tables.values(rows, metric)
    return {s: math.log(v) for s, v in found.items()} if metric == "perplexity" else found


def _figures(rows: Sequence[Row], arms: Sequence[str]) -> list[figures.Figure]:
    """Bits per byte by vocabulary, a figure for each budget."""
    kinds = {"char": "characters", "bpe": "subwords", "word": "words"}
    found = []
    for budget in dict.fromkeys(r["axes"]["budget"] for r in rows):
        drawn = [r | {"arm": kinds.get(r["arm"].partition("(")[0], r["arm"]),
                      "axes": {"vocabulary": r["metrics"]["vocabulary"]}} for r in rows
                 if r["arm"] in arms and r["axes"]["budget"] == budget]
        found.append(figures.lines(
            drawn, "bpb", "vocabulary", name=f"bits_{budget}", xlabel="vocabulary",
            title=f"Bits per byte by vocabulary, equal {budget}", arms=tuple(kinds.values()),
            ylabel="bits per byte", caption="Mean over seeds with 95 % CI, points are seeds, "
            "unknown words spelled, each at its best learning rate."))
    return found
