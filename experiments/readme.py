"""Rewrite the generated blocks of README.md: `python -m experiments.readme --run=DIR`.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`. `capabilities` comes from the
declarations of the attention implementations; `results` from the tables and figures of a finished
scaling ablation, which --run names.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tx_jax import flags
from tx_jax.attention import capability_matrix
from tx_jax.errors import UserError

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
IMAGES = ROOT / "images"
# Headings of the report shown, and figures, in this order.
SHOWN = ("Published claims", "Retrieval at each arm's best learning rate",
         "Character language model at each arm's best learning rate")
FIGURES = ("retrieval_accuracy", "retrieval_d_k", "initial_gradient")


@dataclass(frozen=True)
class _Nothing:
    """No settings."""


FLAGS = {"run": flags.Leaf("run", str, "", {"help": "workdir of a finished scaling ablation"})}


def put(text: str, name: str, content: str) -> str:
    """`text` with the block `name` replaced.

    Raises:
      UserError: there is no such block.
    """
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise UserError(f"README.md has no block 'generated: {name}'; add it.")
    return pattern.sub(lambda m: f"{m[1]}{content.strip()}\n{m[2]}", text, count=1)


def sections(markdown: str) -> dict[str, str]:
    """Heading -> body of every `###` section."""
    parts = re.split(r"^### (.+)$", markdown, flags=re.MULTILINE)
    return {title.strip(): body.strip() for title, body in zip(parts[1::2], parts[2::2],
                                                               strict=True)}


def results(run: Path) -> str:
    """Tables and figures of a run; the figures are copied into `images/`.

    Raises:
      UserError: the directory holds no finished report.
    """
    if not (run / "table.md").exists():
        raise UserError(f"--run={run} holds no table.md; run the ablation there first.")
    found = sections((run / "table.md").read_text(encoding="utf-8"))
    IMAGES.mkdir(exist_ok=True)
    parts = []
    for name in FIGURES:
        shutil.copyfile(run / "figures" / f"{name}.png", IMAGES / f"{name}.png")
        parts.append(f"![{name}](images/{name}.png)")
    parts += [f"**{title}.**\n\n{found[title]}" for title in SHOWN if title in found]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the capability matrix and, with --run, the results."""
    try:
        given = flags.parse(list(sys.argv[1:] if argv is None else argv), _Nothing(), FLAGS)
        text = put(README.read_text(encoding="utf-8"), "capabilities", capability_matrix())
        if "run" in given:
            text = put(text, "results", results(Path(given["run"]).expanduser()))
        README.write_text(text, encoding="utf-8")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
