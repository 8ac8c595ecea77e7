"""Attention maps as pictures: a PNG of the heads of a layer, and one page to look around in."""

import base64
import html
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

LARGEST_PAGE = 2**23  # weights, 22 MB of page
_VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d"})
_SPACING = 0.115  # inches that a label of a token needs


def visible(token: str) -> str:
    """A token as a label: white space gets a sign, as it would not be seen."""
    return token.translate(_VISIBLE)


def draw_maps(weights_NTS: np.ndarray, rows: Sequence[str], columns: Sequence[str],
              path: str | Path, *, title: str = "") -> Path:
    """Write a PNG with a heat map per head; self-attention, or a rectangle for cross-attention.

    Args:
      rows: the T tokens that ask, columns: the S tokens that are looked at.
    """
    N, T, S = weights_NTS.shape
    if (len(rows), len(columns)) != (T, S):
        raise ValueError(f"{len(rows)} rows and {len(columns)} columns for weights {(N, T, S)}.")
    width, height = (max(2.4, min(9.0, n * _SPACING + 0.7)) for n in (S, T))
    across = min(N, max(1, int(13 // width)))
    across = math.ceil(N / math.ceil(N / across))  # as many in the last line as can be
    down = math.ceil(N / across)
    figure = Figure(figsize=(across * width + 0.9, down * (height + 0.3) + 0.4), dpi=110,
                    layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False)
    image = None
    for n, ax in enumerate(grid.flat):
        if n >= N:
            ax.set_axis_off()
            continue
        image = ax.imshow(weights_NTS[n], cmap="Blues", norm=PowerNorm(0.5, 0, 1),
                          interpolation="nearest", aspect="auto")
        ax.set_title(f"head {n + 1}", fontsize=9)
        for axis, tokens, inches in ((ax.xaxis, columns, width), (ax.yaxis, rows, height)):
            every = max(1, math.ceil(len(tokens) * _SPACING / (inches - 0.6)))
            shown = range(0, len(tokens), every)
            axis.set_ticks(list(shown), [visible(tokens[i])[:12] for i in shown])
            for label in axis.get_ticklabels():
                label.set_parse_math(False)
            axis.set_tick_params(labelsize=7, length=2, pad=1.5)
        if max(map(len, columns)) > 1:
            ax.tick_params(axis="x", rotation=90)
    bar = figure.colorbar(image, ax=list(grid.flat), shrink=min(1.0, 2.4 / (down * height)),
                          ticks=[0, 0.05, 0.25, 0.5, 1], aspect=15)
    bar.set_label("weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    heading = figure.suptitle(title or " ", fontsize=10)
    heading.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a script that the font lacks shows boxes
        figure.savefig(path, facecolor="white", metadata={"Software": None})
    return Path(path)


def render_page(weights_LNTS: np.ndarray, rows: Sequence[str], columns: Sequence[str], *,
                title: str, about: Sequence[str] = ()) -> str:
    """One HTML page that loads nothing: pick a head, point at a token, read its weights."""
    raw = np.round(np.clip(weights_LNTS, 0, 1) * 65535).astype("<u2").tobytes()
    data = json.dumps({"shape": weights_LNTS.shape, "rows": list(map(visible, rows)),
                       "columns": list(map(visible, columns)),
                       "weights": base64.b64encode(raw).decode()}).replace("<", "\\u003c")
    said = "".join(f"<p class=soft>{html.escape(text)}</p>" for text in about)
    return (_PAGE.replace("@TITLE@", html.escape(title)).replace("@ABOUT@", said)
            .replace("@DATA@", data))


_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>@TITLE@</title><style>
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --soft: #666; --line: #ccc;
  --hot: 8,81,156; --mark: #d55e00; --over: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e2; --paper: #161616; --soft: #a0a0a0;
  --line: #444; --hot: 120,180,255; --mark: #ff9a4d; --over: #111 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 0 auto; padding: 1.5rem 1.2rem 4rem }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } h2 { font-size: 1.02rem; margin: 1.3rem 0 .3rem }
.soft { color: var(--soft); font-size: .9rem; margin: .2rem 0 }
.strip { display: flex; flex-wrap: wrap; gap: 2px; font: 15px/1.4 ui-monospace, monospace }
.strip button { font: inherit; color: inherit; background: none; border: 1px solid var(--line);
  border-radius: 3px; padding: 1px 4px; min-width: 1.4em; cursor: pointer }
.strip button.on { outline: 2px solid var(--mark); outline-offset: 0 }
#heads { display: grid; gap: .5rem; overflow-x: auto }
#heads button { font: .8rem system-ui, sans-serif; color: inherit; background: none; padding: 3px;
  border: 2px solid transparent; border-radius: 4px; cursor: pointer }
#heads button[aria-pressed=true] { border-color: var(--mark) }
#heads canvas { width: 100%; max-width: 9rem; aspect-ratio: 1; image-rendering: pixelated;
  border: 1px solid var(--line); display: block; margin: 0 auto }
.two { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start }
#map { max-width: 100%; cursor: crosshair } #side { flex: 1; min-width: 15rem }
#read { min-height: 3.2em; font-variant-numeric: tabular-nums }
.bar { display: grid; grid-template-columns: 7em 3.6em 1fr; gap: .5em; align-items: center;
  font: 14px/1.7 ui-monospace, monospace; white-space: pre; overflow: hidden }
.bar i { display: block; height: .8em; background: rgb(var(--hot)); min-width: 1px }
</style></head><body><h1>@TITLE@</h1>@ABOUT@
<h2>Heads</h2><div id="heads"></div>
<h2>Tokens that ask: point at one, click to keep it</h2><div id="rows" class="strip"></div>
<h2>Where it looks</h2><div id="columns" class="strip"></div>
<div class="two"><div><h2 id="name"></h2><canvas id="map"></canvas></div>
<div id="side"><h2>Weights</h2><div id="read" aria-live="polite"></div><div id="top"></div></div>
</div><script>
const D = @DATA@, [L, N, T, S] = D.shape, at = id => document.getElementById(id);
const bytes = Uint8Array.from(atob(D.weights), c => c.charCodeAt(0));
const W = new DataView(bytes.buffer);
let layer = 0, head = 0, row = T - 1, kept = T - 1, col = -1;
const one = (l, n, t, s) => W.getUint16(2 * (((l * N + n) * T + t) * S + s), true) / 65535;
const weight = (l, n, t, s) => {  // head N is the mean of the layer
  if (n < N) return one(l, n, t, s);
  let sum = 0; for (let i = 0; i < N; i++) sum += one(l, i, t, s); return sum / N };
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function shade(button, w) {
  button.style.background = `rgba(${css("--hot")},${Math.sqrt(w).toFixed(3)})`;
  button.style.color = w > .3 ? css("--over") : "" }
function paint(canvas, l, n, x0, y0, cell, hot) {
  const pen = canvas.getContext("2d");
  for (let t = 0; t < T; t++) for (let s = 0; s < S; s++) {
    const w = weight(l, n, t, s); if (w < 1e-4) continue;
    pen.fillStyle = `rgba(${hot},${Math.sqrt(w).toFixed(3)})`;
    pen.fillRect(x0 + s * cell, y0 + t * cell, cell, cell) } }
const title = (l, n) => `layer ${l + 1}, ` + (n < N ? `head ${n + 1}` : "mean");
function thumbs() {
  const shown = N > 1 ? N + 1 : N, size = Math.max(1, Math.floor(160 / Math.max(T, S)));
  at("heads").style.gridTemplateColumns = `repeat(${shown}, minmax(5rem, 9.5rem))`;
  for (let l = 0; l < L; l++) for (let n = 0; n < shown; n++) {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    canvas.width = S * size; canvas.height = T * size;
    paint(canvas, l, n, 0, 0, size, css("--hot"));
    button.append(canvas, title(l, n)); button.dataset.key = l + "," + n;
    button.onclick = () => { layer = l; head = n; base = null; show() };
    at("heads").append(button) } }
function strip(id, tokens, enter, click) {
  tokens.forEach((token, i) => { const b = document.createElement("button");
    b.textContent = token; b.onmouseenter = b.onfocus = () => enter(i); b.onclick = () => click(i);
    at(id).append(b) });
  at(id).onmouseleave = () => { row = kept; col = -1; show() } }
const cell = Math.max(3, Math.min(22, Math.floor(600 / Math.max(T, S))));
const label = list => 10 + 8.4 * Math.max(...list.map(t => Math.min(12, t.length)));
const left = label(D.rows), over = label(D.columns), every = Math.max(1, Math.ceil(13 / cell));
let base = null;
function map() {
  const canvas = at("map"), dots = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  const width = left + S * cell + 1, height = over + T * cell + 1;
  if (!base) {
    base = document.createElement("canvas"); base.width = width * dots; base.height = height * dots;
    const p = base.getContext("2d"); p.scale(dots, dots); p.fillStyle = css("--ink");
    p.font = "13px ui-monospace, monospace"; p.textBaseline = "middle"; p.textAlign = "right";
    for (let t = 0; t < T; t += every)
      p.fillText(D.rows[t].slice(0, 12), left - 5, over + (t + .5) * cell);
    const upright = D.columns.every(t => t.length == 1);
    if (upright) p.textAlign = "center";
    for (let s = 0; s < S; s += every) { p.save();
      p.translate(left + (s + .5) * cell, over - (upright ? 8 : 5));
      if (!upright) p.rotate(Math.PI / 2);
      p.fillText(D.columns[s].slice(0, 12), 0, 0); p.restore() }
    paint(base, layer, head, left, over, cell, css("--hot"));
    p.strokeStyle = css("--line"); p.strokeRect(left - .5, over - .5, S * cell + 1, T * cell + 1);
    canvas.width = base.width; canvas.height = base.height;
    canvas.style.width = width + "px" }
  pen.setTransform(1, 0, 0, 1, 0, 0); pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(base, 0, 0); pen.scale(dots, dots); pen.strokeStyle = css("--mark");
  pen.lineWidth = 1.5; pen.strokeRect(left, over + row * cell, S * cell, cell);
  if (col >= 0) pen.strokeRect(left + col * cell, over, cell, T * cell) }
function show() {
  for (const b of at("heads").children)
    b.setAttribute("aria-pressed", b.dataset.key == layer + "," + head);
  at("name").textContent = title(layer, head);
  [...at("rows").children].forEach((b, t) => { b.classList.toggle("on", t == row);
    shade(b, col >= 0 ? weight(layer, head, t, col) : 0) });
  const found = D.columns.map((token, s) => [weight(layer, head, row, s), token, s]);
  [...at("columns").children].forEach((b, s) => { b.classList.toggle("on", s == col);
    shade(b, found[s][0]) });
  const said = (list, i) => `\\u201c${list[i]}\\u201d (${i + 1})`;
  at("read").textContent = col < 0 ? `${said(D.rows, row)} looks at:` :
    `${said(D.rows, row)} gives ${said(D.columns, col)} the weight ${found[col][0].toFixed(4)}`;
  at("top").replaceChildren(...found.sort((a, b) => b[0] - a[0]).slice(0, 12)
    .filter(f => f[0] > 0).map(([w, token, s]) => { const line = document.createElement("div");
      line.className = "bar"; const name = document.createElement("span"), n = name.cloneNode();
      const bar = document.createElement("i"); bar.style.width = 100 * w + "%";
      name.textContent = `${s + 1} ${token}`; n.textContent = w.toFixed(3);
      line.append(name, n, bar); return line }));
  map() }
function point(event) {
  const box = at("map").getBoundingClientRect(), zoom = (left + S * cell + 1) / box.width;
  const s = Math.floor(((event.clientX - box.left) * zoom - left) / cell);
  const t = Math.floor(((event.clientY - box.top) * zoom - over) / cell);
  return s >= 0 && s < S && t >= 0 && t < T ? [t, s] : null }
at("map").onmousemove = e => { const p = point(e); if (p) { [row, col] = p; show() } };
at("map").onclick = e => { const p = point(e); if (p) { kept = p[0]; show() } };
at("map").onmouseleave = () => { row = kept; col = -1; show() };
strip("rows", D.rows, i => { row = i; col = -1; show() }, i => { kept = row = i; show() });
strip("columns", D.columns, i => { col = i; show() }, i => { col = i; show() });
thumbs(); show();
matchMedia("(prefers-color-scheme: dark)").onchange = () => {
  at("heads").replaceChildren(); thumbs(); base = null; show() };
</script></body></html>
"""
