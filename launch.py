"""Run a study from flags: `python launch.py --experiment=scaling_ablation --preset=small`.

An experiment is a file of `experiments/` that defines `STUDY`; `--list` shows them, `--help` shows
the flags of one, `--explain` what a command would do, `--table` rebuilds a table without running.
`--check_attention=my_package.my_module:my_function` checks an implementation of attention instead,
and `--generate --run=DIR --prompt="..."` continues a text with a model of `language_model`.
"""

import importlib
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from absl import logging
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tx_jax import flags, plugins, workdir
from tx_jax.config import resolved
from tx_jax.conformance import check_attention
from tx_jax.errors import UserError, nearest
from tx_jax.study.driver import run_study

LAUNCH = {leaf.name: leaf for leaf in (
    flags.Leaf("experiment", str, "", {"help": "which study to run"}),
    flags.Leaf("preset", str, "small", {"help": "size of the study: smoke, small or full"}),
    flags.Leaf("workdir", str, "", {"help": "where results go; default runs/EXPERIMENT-PRESET"}),
    flags.Leaf("cpu_devices", int, 0, {"help": "virtual CPU devices; 0 = one per core"}),
    flags.Leaf("cell", str, "", {"help": "run only the cell with this id; a finished one again, "
                                         "with all that trained with it, to compare"}),
    flags.Leaf("table", bool, False, {"help": "rebuild table, figures and report; run nothing"}),
    flags.Leaf("explain", bool, False, {"help": "print settings and cells; run nothing"}),
    flags.Leaf("list", bool, False, {"help": "list the experiments"}),
    flags.Leaf("help", bool, False, {"help": "show the flags of the experiment"}),
)}

CHECK = {leaf.name: leaf for leaf in (
    flags.Leaf("check_attention", str, "", {"help": "name or module:function of an attention"}),
    flags.Leaf("cases", int, 0, {"help": "random cases to try; 0 = a few"}),
)}

GENERATE = {leaf.name: leaf for leaf in (
    flags.Leaf("generate", bool, False, {"help": "continue a text with a trained model"}),
)}


@dataclass(frozen=True)
class _NoSettings:
    """--check_attention has flags of its own only."""


def experiments() -> list[str]:
    """Names of the studies: the public modules of `experiments` that define STUDY."""
    folder = importlib.import_module("experiments").__path__[0]
    found = []
    for name in plugins.names("experiments"):
        with open(os.path.join(folder, f"{name}.py"), encoding="utf-8") as file:
            if "\nSTUDY = " in file.read():
                found.append(name)
    return found


def find_experiment(argv: Sequence[str]) -> str:
    """The value of --experiment, before the flags that depend on it can be defined."""
    name = ""
    for i, word in enumerate(argv):
        key, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and key == "experiment":
            name = value if equals else (argv[i + 1] if i + 1 < len(argv) else "")
    options = experiments()
    if not name:
        raise UserError(f"no experiment is named; add --experiment=NAME with one of: "
                        f"{', '.join(options)}.")
    if name not in options:
        raise UserError(f"there is no experiment '{name}'{nearest(name, options)}")
    return name


def configure(study: Any, argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """(settings, launch flags) from preset and command line.

    Raises:
      UserError: any mistake on the command line.
    """
    base = study.settings()
    given = flags.parse(argv, base, LAUNCH)
    options = {name: given.pop(name, leaf.default) for name, leaf in LAUNCH.items()}
    preset = options["preset"]
    if preset not in study.presets:
        raise UserError(f"--preset={preset} is unknown to '{study.name}'"
                        f"{nearest(preset, study.presets)}")
    for first, second in (("table", "cell"), ("table", "explain"), ("explain", "cell")):
        if options[first] and options[second]:
            raise UserError(f"--{first} and --{second} contradict each other; give one of them.")
    base = flags.replace(base, dict(study.presets[preset]))
    settings = flags.replace(base, given)
    flags.check_effective(settings, given, study.swept)
    study.check(settings)
    check_changes_cells(study, settings, base, given)
    options["given"] = given
    return settings, options


def check_changes_cells(study: Any, settings: Any, base: Any, given: dict[str, Any]) -> None:
    """Refuse a flag without which the very same cells would run."""
    usual, cells = flags.leaves(base), study.cells(settings)
    for name, value in given.items():
        if value == usual[name].default or usual[name].meta.get("run_only"):
            continue
        try:
            without = flags.replace(settings, {name: usual[name].default})
            same = study.cells(without) == cells
        except UserError:
            continue  # the settings are impossible without it: it matters
        # A derived default may be written out, as any other default may.
        if same and resolved(without) != resolved(settings):
            raise UserError(f"--{name}={value} has no effect with these settings, as the same "
                            "cells would run without it; drop it.")


def command_of(study: Any, options: dict[str, Any]) -> list[str]:
    """The command line that reproduces these results, without switches of what to do."""
    words = ["python", "launch.py", f"--experiment={study.name}", f"--preset={options['preset']}"]
    for name, value in options["given"].items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(f"--{name}={text}")
    if options["cpu_devices"]:
        words.append(f"--cpu_devices={options['cpu_devices']}")
    return words


def start_devices(wanted: int) -> None:
    """One virtual CPU device per core, so that replicas run side by side; no effect on a GPU."""
    if wanted < 0:
        raise UserError(f"--cpu_devices={wanted} must be 0 or more.")
    jax.config.update("jax_num_cpu_devices", wanted or len(os.sched_getaffinity(0)))


def show_list(console: Console) -> None:
    """Print every experiment with the first line of its file."""
    table = Table("experiment", "what it shows", box=None)
    for name in experiments():
        module = importlib.import_module(f"experiments.{name}")
        table.add_row(name, (module.__doc__ or "").strip().splitlines()[0])
    console.print(table)


def show_flags(console: Console, study: Any) -> None:
    """Print the flags of an experiment with their defaults in the small preset."""
    settings = flags.replace(study.settings(), dict(study.presets["small"]))
    module = importlib.import_module(f"experiments.{study.name}")
    console.print(escape((module.__doc__ or "").strip()))
    console.print(flag_table([*LAUNCH.values(), *flags.leaves(settings).values()]))


def flag_table(leaves: Sequence[flags.Leaf]) -> Table:
    """Flags with their defaults and meanings."""
    table = Table("flag", "default", "meaning", box=None)
    for leaf in leaves:
        default = leaf.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        help_ = leaf.meta.get("help", "")
        if leaf.meta.get("choices"):
            help_ += f" ({', '.join(map(str, leaf.meta['choices']))})"
        table.add_row(f"--{leaf.name}", escape(str(default)), escape(help_))
    return table


def explain(console: Console, study: Any, settings: Any, command: Sequence[str]) -> None:
    """Print what a command would run: settings, and cells by part and group."""
    console.print(escape(f"{study.title}: {shlex.join(command)}"))
    table = Table("setting", "value", box=None)
    for name, leaf in flags.leaves(settings).items():
        table.add_row(name, escape(str(leaf.default)))
    console.print(table)
    cells = study.cells(settings)
    parts = Counter(cell.part for cell in cells)
    programs = len({study.group(cell) for cell in cells})
    console.print(f"{len(cells)} cells ({', '.join(f'{n} {part}' for part, n in parts.items())}) "
                  f"in {programs} programs.")


def check(argv: list[str], console: Console) -> int:
    """Print the capability card of an attention; 0 if it conforms, 1 if not."""
    given = flags.parse(argv, _NoSettings(), CHECK)
    if given.get("cases", 1) < 1:
        raise UserError(f"--cases={given['cases']} must be 1 or more.")
    jax.config.update("jax_num_cpu_devices", 8)  # to compare sharded with whole
    return 0 if check_attention(given["check_attention"], console, given.get("cases", 0)) else 1


def generate(argv: list[str], console: Console) -> int:
    """Print a prompt and what a trained model makes of it."""
    module = importlib.import_module("experiments._generate")
    base = module.Settings()
    # The flags of sampling stand without their prefix.
    sampling = flags.leaves(base.sampling)
    own = {n: leaf for n, leaf in flags.leaves(base).items() if "." not in n}
    known = GENERATE | own | sampling
    if "--help" in argv:
        console.print(escape((module.__doc__ or "").strip()))
        console.print(flag_table(list(known.values())))
        return 0
    given = flags.parse(argv, _NoSettings(), known)
    if not given.pop("generate"):
        raise UserError("--generate=false asks for nothing; write --generate, or drop the flag.")
    settings = flags.replace(base, {f"sampling.{name}" if name in sampling else name: value
                                    for name, value in given.items()})
    flags.check_effective(settings.sampling, given, {})
    if "seed" in given and settings.sampling.temperature == 0:
        raise UserError("--seed has no effect with --temperature=0, since nothing is drawn; drop "
                        "one of them.")
    module.continue_text(settings, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0, or 1 after failed cells, or 2 after a mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=False, soft_wrap=True, highlight=False)
    # Errors reach the user as our one sentence; the checkpoint library would log its trace as well.
    logging.set_verbosity(logging.FATAL)
    sys.path.append(os.getcwd())  # where `module:function` of a user may lie
    try:
        return run(argv, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here.", file=sys.stderr)
        return 130


def run(argv: list[str], console: Console) -> int:
    """As `main`, but mistakes raise UserError."""
    if "--list" in argv:
        if others := [word for word in argv if word != "--list"]:
            raise UserError(f"--list stands alone; drop '{others[0]}'.")
        show_list(console)
        return 0
    if any(word.lstrip("-").split("=")[0] == "check_attention" for word in argv):
        return check(argv, console)
    if any(word.lstrip("-").split("=")[0] == "generate" for word in argv):
        return generate(argv, console)
    if argv == ["--help"]:
        console.print((__doc__ or "").strip())
        show_list(console)
        return 0
    name = find_experiment(argv)
    study = importlib.import_module(f"experiments.{name}").STUDY
    if "--help" in argv:
        show_flags(console, study)
        return 0
    settings, options = configure(study, argv)
    if options["list"]:
        raise UserError("--list stands alone, written just so; drop the other flags.")
    command = command_of(study, options)
    if options["explain"]:
        explain(console, study, settings, command)
        return 0
    root = workdir.claim(options["workdir"] or f"runs/{name}-{options['preset']}", name)
    start_devices(options["cpu_devices"])
    if options["workdir"]:
        command.append(f"--workdir={options['workdir']}")
    outcome = run_study(study, settings, root, only_table=options["table"],
                        cell=options["cell"] or None, command=command, console=console)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
