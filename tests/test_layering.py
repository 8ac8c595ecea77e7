"""Arrows between modules point one way, rooms stay small, and importing starts no device.

`LAYERS` is the order of the design. Whoever adds a module adds its name to a row; a module may
import its own row and the rows above it in the table, never one below.
"""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tx_jax", "experiments", "kernels_pallas", "launch")

LAYERS = (
    {"tx_jax", "tx_jax.errors", "tx_jax.plugins", "tx_jax.config", "tx_jax.construct",
     "tx_jax.options"},
    {"tx_jax.flags", "tx_jax.workdir"},
    {"kernels_pallas"},
    {"tx_jax.attention", "tx_jax.data", "tx_jax.dtypes", "tx_jax.layers", "tx_jax.letters",
     "tx_jax.loss", "tx_jax.masks", "tx_jax.positions", "tx_jax.sharding", "tx_jax.tokenizers"},
    {"tx_jax.beam", "tx_jax.blocks", "tx_jax.cache", "tx_jax.conformance", "tx_jax.models",
     "tx_jax.decode", "tx_jax.flax_attention", "tx_jax.forms", "tx_jax.limits", "tx_jax.requests",
     "tx_jax.sampling", "tx_jax.seq2seq"},
    {"tx_jax.optim"},
    {"tx_jax.checkpoint", "tx_jax.fit", "tx_jax.hf", "tx_jax.leaks", "tx_jax.metrics",
     "tx_jax.plan", "tx_jax.train"},
    {"tx_jax.study"},
    {"experiments"},
    {"launch"},
)
# Rooms that may use only these libraries besides the standard one.
LIBRARIES = {
    **dict.fromkeys(LAYERS[0], frozenset()),
    **dict.fromkeys(LAYERS[1], frozenset({"absl"})),
    "kernels_pallas": frozenset({"jax"}),
}
# Rooms that may not import any other room, whatever its layer.
ALONE = {"kernels_pallas"}
# Scripts that run in a process of their own with an optional library; no module imports them.
SCRIPTS = dict.fromkeys(("experiments._torch_gpt", "experiments._torch_attention",
                         "experiments._torch_llama"), "torch")
MAX_FILE, MAX_FUNCTION = 400, 80


def room(module: str) -> str:
    """`tx_jax.attention.flash` -> `tx_jax.attention`; `experiments.x` -> `experiments`."""
    return ".".join(module.split(".")[: 2 if module.startswith("tx_jax.") else 1])


def level(module: str) -> int | None:
    return next((i for i, row in enumerate(LAYERS) if room(module) in row), None)


def find_modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module of the project's packages under `root`."""
    files = [f for p in PACKAGES for f in [root / f"{p}.py", *root.glob(f"{p}/**/*.py")]]
    names = {f: ".".join(f.relative_to(root).with_suffix("").parts) for f in files if f.exists()}
    return {name.removesuffix(".__init__"): f for f, name in names.items()}


def imports(module: str, path: Path, modules: dict[str, Path]) -> list[tuple[str, int, bool]]:
    """(imported module, line, inside a function?) of each import and each load by literal name."""
    found: list[tuple[str, int, bool]] = []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, local: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, local) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                found.append((name if name in modules else source, node.lineno, local))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("load", "names", "construct", "import_module"):
                if node.args[0].value in modules:  # by name on purpose, so never "local"
                    found.append((node.args[0].value, node.lineno, False))
        inside = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A cycle as a list of names, first = last, or None."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node):], node]
        if node in done:
            return None
        found = next((c for n in sorted(graph.get(node, ())) if (c := walk(n, [*trail, node]))),
                     None)
        done.add(node)
        return found

    return next((c for node in sorted(graph) if (c := walk(node, []))), None)


def check_imports(root: Path) -> list[str]:
    """Every breach of the rules of this file in the packages under `root`, a sentence each."""
    modules, problems = find_modules(root), []
    files: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for module, path in modules.items():
        if level(module) is None:
            problems.append(f"{module} has no layer: add {room(module)} to LAYERS")
            continue
        for target, line, local in imports(module, path, modules):
            where, top = f"{path.relative_to(root)}:{line}", target.split(".")[0]
            if top == "tests":
                problems.append(f"{where} imports the tests")
            elif top not in PACKAGES:
                allowed = LIBRARIES.get(room(module))
                if allowed is not None and top not in sys.stdlib_module_names | allowed:
                    problems.append(f"{where} imports {target}: {room(module)} may use only the "
                                    f"standard library{' and '.join(['', *sorted(allowed)])}")
            else:
                here, there = room(module), room(target)
                if local:
                    problems.append(f"{where} imports {target} inside a function")
                if target in SCRIPTS:
                    problems.append(f"{where} imports {target}, which is a script")
                if here != there and here in ALONE:
                    problems.append(f"{where} imports {target}: {here} stands alone")
                if (level(target) or 0) > (level(module) or 0):
                    problems.append(f"{where} imports upwards: {module} -> {target}")
                files.setdefault(module, set()).update({target} - {module})
                rooms.setdefault(here, set()).update({there} - {here})
    problems = list(dict.fromkeys(problems))  # one import of two names is one breach
    for graph in (files, rooms):
        if cycle := find_cycle(graph):
            problems.append(f"import cycle {' -> '.join(cycle)}")
    return problems


def check_sizes(root: Path, paths: list[Path]) -> list[str]:
    """Files and functions that are too long, with their lengths."""
    problems = []
    for path in paths:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root)
        if (lines := len(text.splitlines())) > MAX_FILE:
            problems.append(f"{name} has {lines} lines, more than {MAX_FILE}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                    problems.append(f"{name}:{node.lineno} {node.name} has {lines} lines, "
                                    f"more than {MAX_FUNCTION}")
    return problems


def run_imports(root: Path) -> subprocess.CompletedProcess:
    """Import every module under `root` in a fresh process that fails if a JAX backend started."""
    code = f"""
        import importlib, sys
        sys.path.insert(0, {str(root)!r})
        from jax._src import xla_bridge
        for name in {sorted(find_modules(root).keys() - SCRIPTS.keys())!r}:
            module = importlib.import_module(name)
            if not module.__file__.startswith({str(root)!r}):
                sys.exit(f"{{name}} comes from elsewhere: {{module.__file__}}")
            if xla_bridge.backends_are_initialized():
                sys.exit(f"importing {{name}} starts a JAX backend")
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=root, env=env,
                          capture_output=True, text=True, timeout=120)


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_imports_point_one_way():
    assert len(find_modules(ROOT)) > 4
    assert not (problems := check_imports(ROOT)), "\n".join(problems)


def test_rooms_are_small():
    paths = [*find_modules(ROOT).values(), *(ROOT / "tests").glob("**/*.py")]
    assert not (problems := check_sizes(ROOT, paths)), "\n".join(problems)


def test_imports_start_no_backend():
    result = run_imports(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("files, problem", [
    ({"tx_jax/masks.py": "import tx_jax.models\n", "tx_jax/models.py": ""},
     "tx_jax/masks.py:1 imports upwards: tx_jax.masks -> tx_jax.models"),
    ({"tx_jax/data/__init__.py": "from .. import train\n", "tx_jax/train.py": ""},
     "imports upwards: tx_jax.data -> tx_jax.train"),
    ({"tx_jax/data/a.py": "from ..study.b import x\n", "tx_jax/study/b.py": "x = 1\n"},
     "imports upwards: tx_jax.data.a -> tx_jax.study.b"),
    ({"tx_jax/layers.py": "load('tx_jax.study', 'x')\n", "tx_jax/study/__init__.py": ""},
     "imports upwards: tx_jax.layers -> tx_jax.study"),
    ({"tx_jax/study/a.py": "from experiments import x\n", "experiments/x.py": ""},
     "imports upwards: tx_jax.study.a -> experiments.x"),
    ({"tx_jax/models.py": "def f():\n    from tx_jax.masks import a, b\n", "tx_jax/masks.py": ""},
     "tx_jax/models.py:2 imports tx_jax.masks inside a function"),
    ({"tx_jax/data/a.py": "import tx_jax.data.b", "tx_jax/data/b.py": "from . import a"},
     "import cycle tx_jax.data.a -> tx_jax.data.b -> tx_jax.data.a"),
    ({"tx_jax/masks.py": "import tx_jax.data.a", "tx_jax/data/a.py": "",
      "tx_jax/data/b.py": "import tx_jax.masks"},
     "import cycle tx_jax.data -> tx_jax.masks -> tx_jax.data"),
    ({"tx_jax/config.py": "import numpy as np\n"},
     "tx_jax/config.py:1 imports numpy: tx_jax.config may use only the standard library"),
    ({"tx_jax/workdir.py": "import jax\n"}, "imports jax"),
    ({"kernels_pallas/a.py": "import numpy\n"}, "imports numpy"),
    ({"kernels_pallas/a.py": "from tx_jax import errors\n", "tx_jax/errors.py": ""},
     "kernels_pallas stands alone"),
    ({"tx_jax/models.py": "from tests import conftest\n"}, "imports the tests"),
    ({"experiments/x.py": "from experiments import _torch_gpt\n", "experiments/_torch_gpt.py": ""},
     "imports experiments._torch_gpt, which is a script"),
    ({"tx_jax/unheard.py": ""}, "tx_jax.unheard has no layer"),
])
def test_a_planted_import_is_found(tmp_path, files, problem):
    plant(tmp_path, files)
    problems = check_imports(tmp_path)
    assert len(problems) == 1 and problem in problems[0], problems


def test_allowed_imports_pass(tmp_path):
    plant(tmp_path, {
        "launch.py": "from absl import app\nfrom experiments import x\nimport tx_jax.study.a\n",
        "experiments/x.py": "from tx_jax import study\n",
        "tx_jax/study/__init__.py": "from tx_jax.study.a import f\n",
        "tx_jax/study/a.py": "def f():\n    import matplotlib\n",
        "tx_jax/attention/__init__.py": "from kernels_pallas import k\nfrom tx_jax import masks\n",
        "tx_jax/masks.py": "import jax\nfrom tx_jax.errors import UserError\n",
        "tx_jax/errors.py": "import difflib\n",
        "kernels_pallas/k.py": "import math\nimport jax.numpy as jnp\n",
    })
    assert check_imports(tmp_path) == []


def test_a_planted_length_is_found(tmp_path):
    plant(tmp_path, {"long.py": "x = 1\n" * 401, "short.py": "x = 1\n" * 400,
                     "tall.py": "def f():\n" + "    x = 1\n" * 80})
    problems = check_sizes(tmp_path, sorted(tmp_path.glob("*.py")))
    assert problems == ["long.py has 401 lines, more than 400",
                        "tall.py:1 f has 81 lines, more than 80"]


def test_a_planted_backend_is_found(tmp_path):
    plant(tmp_path, {"tx_jax/__init__.py": "",
                     "tx_jax/masks.py": "import jax\nn = jax.device_count()\n"})
    assert "importing tx_jax.masks starts a JAX backend" in run_imports(tmp_path).stderr
