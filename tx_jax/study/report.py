"""The report of a study: one self-contained HTML page, the tables as files, the figures as PNGs."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError
from tx_jax.study.figures import Figure
from tx_jax.study.tables import Bold, Table
from tx_jax.study.verdicts import Verdict
from tx_jax.workdir import write_atomic

_CSS = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --soft: #666; --line: #ddd;
  --wash: #f5f5f3; --link: #0a58a5; --good: #00734f; --bad: #b04a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e2; --paper: #161616; --soft: #a0a0a0;
  --line: #383838; --wash: #202020; --link: #7db8f0; --good: #4cc79a; --bad: #f0975a } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 0 auto; padding: 2rem 1.2rem 5rem }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1.02rem; margin: 1.8rem 0 .4rem }
a { color: var(--link) } nav ul { padding-left: 1.2rem; margin: .3rem 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem;
  font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap }
th { border-bottom: 2px solid var(--soft); white-space: normal; vertical-align: bottom }
td.wide { white-space: normal; min-width: 16rem }
td.agrees, td.differs, td.not { white-space: normal; min-width: 7rem }
figure { margin: 1rem 0 } img { max-width: 100%; height: auto; background: #fff }
figcaption, .note, .soft { color: var(--soft); font-size: .88rem }
details { margin: .5rem 0; font-size: .85rem } summary { cursor: pointer; color: var(--soft) }
code, pre { font: .82rem/1.45 ui-monospace, monospace }
pre { background: var(--wash); padding: .7rem; overflow-x: auto }
.agrees { color: var(--good) } .differs { color: var(--bad) } .not { color: var(--soft) }
"""


_CORRECTED = "A p marked (Holm) is corrected over the claims of this table."


@dataclass(frozen=True)
class Report:
    """What a study says; `summary` and `notes` are plain paragraphs, `facts` label -> value."""

    title: str
    summary: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


def run_facts(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """What made the rows of a ledger: implementations, device, versions, code, data, seconds."""
    first = rows[0]
    kernels, strategies = ({r[k] for r in rows} - {"none"} for k in ("kernel", "strategy"))
    return (("attention implementation", ", ".join(sorted(kernels)) or "none"),
            ("replica strategy", ", ".join(sorted(strategies)) or "none"),
            ("device", first["device"]),
            ("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)),
            ("code", first["code"][:12]), ("data", first["data"][:12]),
            ("cells", str(len(rows))),
            ("cell seconds in all", f"{sum(r['seconds'] for r in rows):.0f}"))


def write_report(report: Report, workdir: Path) -> Path:
    """Write report.html, table.md/.csv/.tex and figures/*.png, each file whole or not at all.

    Returns:
      The path of report.html.

    Raises:
      UserError: the folder cannot be written.
    """
    workdir = Path(workdir)
    try:
        (workdir / "figures").mkdir(parents=True, exist_ok=True)
        for figure in report.figures:
            write_atomic(workdir / "figures" / f"{figure.name}.png", figure.png)
        write_atomic(workdir / "table.md", markdown(report))
        write_atomic(workdir / "table.csv", "\n".join(
            f"# {t.title}\n{t.csv()}" for t in report.tables))
        write_atomic(workdir / "table.tex", "\n".join(t.latex() for t in report.tables))
        write_atomic(workdir / "report.html", render(report))
    except OSError as e:
        raise UserError(f"the report cannot be written to {workdir} ({e.strerror}); choose another "
                        "--workdir.") from e
    return workdir / "report.html"


def markdown(report: Report) -> str:
    """Title, summary, verdicts, tables and notes as Markdown."""
    parts = [f"## {report.title}", *report.summary]
    if report.verdicts:
        parts.append(verdict_table(report.verdicts).markdown())
    parts += [t.markdown() for t in report.tables]
    if report.notes:
        parts.append("\n".join(f"- {n}" for n in report.notes))
    return "\n\n".join(p.strip() for p in parts) + "\n"


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """The published claims and what these seeds say."""
    rows = tuple((v.claim, Bold(v.outcome), v.detail,
                  "–" if v.seeds_needed is None else str(v.seeds_needed)) for v in verdicts)
    return Table("Published claims", ("claim", "verdict", "here", "seeds needed"), rows,
                 caption=_CORRECTED)


def render(report: Report) -> str:
    """The HTML page; it loads nothing from anywhere."""
    sections: list[tuple[str, str]] = []
    if report.verdicts:
        sections.append(("Published claims", _verdicts(report.verdicts)))
    if report.figures:
        sections.append(("Figures", "".join(map(_figure, report.figures))))
    if report.tables:
        sections.append(("Tables", "".join(map(_table, report.tables))))
    if report.notes:
        items = "".join(f"<li>{_e(n)}</li>" for n in report.notes)
        sections.append(("Notes", f"<ul class=note>{items}</ul>"))
    if report.facts:
        rows = "".join(f"<tr><th>{_e(k)}</th><td class=wide>{_e(v)}</td></tr>"
                       for k, v in report.facts)
        sections.append(("How these numbers were made",
                         f"<div class=scroll><table>{rows}</table></div>"))
    contents = "".join(f'<li><a href="#{_slug(t)}">{_e(t)}</a>{_inner(t, report)}</li>'
                       for t, _ in sections)
    body = "".join(f'<h2 id="{_slug(t)}">{_e(t)}</h2>{content}' for t, content in sections)
    summary = "".join(f"<p>{_e(p)}</p>" for p in report.summary)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_e(report.title)}</title><style>{_CSS}</style></head><body>"
            f"<h1>{_e(report.title)}</h1>{summary}"
            f'<nav aria-label="Contents"><ul>{contents}</ul></nav>{body}</body></html>\n')


def _inner(section: str, report: Report) -> str:
    titles = {"Figures": [f.title for f in report.figures],
              "Tables": [t.title for t in report.tables]}.get(section, [])
    items = "".join(f'<li><a href="#{_slug(t)}">{_e(t)}</a></li>' for t in titles)
    return f"<ul>{items}</ul>" if items else ""


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    rows = "".join(
        f"<tr><td class=wide>{_e(v.claim)}</td>"
        f'<td class="{v.outcome.split()[0]}"><b>{_e(v.outcome)}</b></td>'
        f"<td class=wide>{_e(v.detail)}</td>"
        f"<td>{'–' if v.seeds_needed is None else v.seeds_needed}</td></tr>" for v in verdicts)
    return (f"<p class=soft>{_CORRECTED}</p>"
            "<div class=scroll><table><tr><th>claim</th><th>verdict</th><th>here</th>"
            f"<th>seeds needed</th></tr>{rows}</table></div>")


def _figure(figure: Figure) -> str:
    data = base64.b64encode(figure.png).decode()
    return (f'<h3 id="{_slug(figure.title)}">{_e(figure.title)}</h3><figure>'
            f'<img alt="{_e(figure.title)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{_e(figure.caption)}</figcaption></figure>")


def _table(table: Table) -> str:
    head = "".join(f"<th>{_e(c)}</th>" for c in table.columns)
    rows = "".join("<tr>" + "".join(
        f"<td><b>{_e(e.text)}</b></td>" if isinstance(e, Bold) else f"<td>{_e(e)}</td>"
        for e in row) + "</tr>" for row in table.rows)
    out = f'<h3 id="{_slug(table.title)}">{_e(table.title)}</h3>'
    if table.caption:
        out += f"<p class=soft>{_e(table.caption)}</p>"
    out += f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>"
    out += "".join(f"<p class=note>{_e(n)}</p>" for n in table.notes)
    if table.commands:
        listing = "\n".join(f"# {label}\n{command}" for label, command in table.commands)
        out += (f"<details><summary>{len(table.commands)} commands that reproduce single cells"
                f"</summary><pre>{_e(listing)}</pre></details>")
    return out


def _e(text: str) -> str:
    return html.escape(text)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())
