"""The set-up: bounds and pins, declared imports, package contents, and what the Makefile does."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("tx_jax", "experiments", "kernels_pallas")
OWN = {*PACKAGES, "launch", "tests"}
# Scripts that a study starts in a process of its own where the extra is installed.
SCRIPTS = dict.fromkeys(("_torch_gpt.py", "_torch_attention.py", "_torch_llama.py"), "torch")
UNPINNED_EXTRAS = {"torch"}  # setup.cfg says why


def read_requirements() -> dict[str, list[Requirement]]:
    """Extra -> requirements; "" holds install_requires."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = dict(parser["options.extras_require"]) | {
        "": parser["options"]["install_requires"]}
    return {extra: [Requirement(line) for line in text.split("\n") if line.strip()]
            for extra, text in extras.items()}


def read_pins() -> list[tuple[str, str]]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(canonicalize_name(name), version) for name, version in pins]


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: it looks at the tracked files")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [f for name in out.stdout.decode().split("\0") if name and (f := ROOT / name).is_file()]


@pytest.mark.parametrize("extra", sorted(read_requirements()))
def test_bounds_admit_the_pins(extra):
    pins = dict(read_pins())
    for requirement in read_requirements()[extra]:
        kinds = {s.operator for s in requirement.specifier}
        assert kinds == {">=", "<"}, f"{requirement} needs a lower and an upper bound"
        if extra not in UNPINNED_EXTRAS:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_every_package_has_one_pin():
    names = [name for name, _ in read_pins()]
    assert len(names) == len(set(names)) > 50
    for _, version in read_pins():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version)


def test_the_environment_is_within_the_bounds():
    requirements = read_requirements()
    for requirement in requirements[""] + requirements["test"]:
        assert requirement.specifier.contains(metadata.version(requirement.name)), requirement


def third_party(path: Path) -> dict[str, bool]:
    """Top-level name of each third-party import -> whether some import stands at module level."""
    found: dict[str, bool] = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                 [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
        for top in {name.split(".")[0] for name in names} - OWN - sys.stdlib_module_names:
            found[top] = found.get(top, False) or node in tree.body
    return found


def undeclared(path: Path, distributions: dict[str, list[str]], always: set[str],
               sometimes: set[str]) -> list[str]:
    """Imports of `path` whose distribution is in neither set; `sometimes` only in functions."""
    return [f"{path.name} imports {name}" for name, at_top in third_party(path).items()
            if not {canonicalize_name(d) for d in distributions.get(name, [name])}
            & (always if at_top else always | sometimes)]


def test_third_party_imports_are_declared():
    groups = {extra: {canonicalize_name(r.name) for r in requirements}
              for extra, requirements in read_requirements().items()}
    base, extras = groups[""], set().union(*groups.values())
    found = metadata.packages_distributions()
    sources = [f for p in PACKAGES for f in (ROOT / p).rglob("*.py")] + [*ROOT.glob("*.py")]
    problems = [p for f in sources for p in
                undeclared(f, found, base | groups.get(SCRIPTS.get(f.name), set()), extras)]
    problems += [p for f in (ROOT / "tests").rglob("*.py")
                 for p in undeclared(f, found, base | groups["test"], extras)]
    assert len(sources) > 4 and not problems, problems


def test_a_planted_import_is_found(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text("import jax, wandb\nimport ast, tx_jax\ndef f():\n    import wandb, unheard\n")
    assert third_party(path) == {"jax": True, "wandb": True, "unheard": False}
    assert undeclared(path, {"jax": ["jax"]}, {"jax"}, {"wandb"}) == [
        "planted.py imports wandb", "planted.py imports unheard"]


# Written so that they do not match themselves.
PRIVATE = re.compile(r"/(?:root|work|Users)/\w|/home/\w|[Pp]ypi[.]org|python[h]osted|"
                     r"registry[.]npmjs|-{2}(?:extra-)?index-url|\bfile:/{3}")


def test_no_machine_paths_or_registry_hosts():
    for path in tracked_files():
        if path.suffix not in (".xz", ".png", ".gz"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert not PRIVATE.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


@pytest.mark.parametrize("line", ["see /ro" "ot/x", "in /ho" "me/me", "file:" "///x",
                                  "pip -" "-index-url", "at py" "pi.org"])
def test_the_pattern_finds_paths_and_hosts(line):
    assert PRIVATE.search(line)
    assert not PRIVATE.search("a file under runs/, ./work or ~/text, from /tmp/x")


def test_the_wheel_holds_every_file(tmp_path):
    """Every tracked file of the packages, texts included, is installed."""
    files = [f.relative_to(ROOT) for f in tracked_files()]
    for name in files:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "src" / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
                    "--no-build-isolation", "--disable-pip-version-check", "-w", tmp_path,
                    tmp_path / "src"], check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    expected = {f.as_posix() for f in files if f.parts[0] in PACKAGES}
    assert expected and not expected - set(zipfile.ZipFile(wheel).namelist())


def test_ci_runs_from_anywhere(tmp_path):
    """It is executable, goes to the root by itself, lints and tests; without make it says so."""
    script = tmp_path / "clone" / ".ci" / "run"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", script)
    assert os.access(script, os.X_OK)
    (script.parent.parent / "Makefile").write_text("lint test:\n\t@echo $@ >> log\n")
    subprocess.run([script], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "clone" / "log").read_text() == "lint\ntest\n"
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "dirname").symlink_to(shutil.which("dirname"))
    result = subprocess.run([shutil.which("bash"), script], env={"PATH": str(bare)},
                            capture_output=True, text=True)
    assert result.returncode == 1 and "make is missing" in result.stderr


class Sandbox:
    """A copy of the Makefile, and a PATH that holds only the programs put there."""

    def __init__(self, root: Path):
        self.root, self.bin, self.home = root / "a clone", root / "bin", root / "home"
        for folder in (self.root, self.bin, self.home):
            folder.mkdir(parents=True)
        for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        for name in ("awk", "chmod", "mkdir", "rm", "touch"):
            (self.bin / name).symlink_to(shutil.which(name))
        self.make_path = shutil.which("make")

    def put(self, path: Path, script: str) -> Path:
        """Write an executable shell script."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def put_python(self, path: Path, version: str) -> Path:
        """The running Python under another version number."""
        info = ", ".join(version.split("."))
        return self.put(path, f'exec "{sys.executable}" -c "import sys; sys.version_info = '
                              f'({info}); exec(sys.argv[1])" "$2"')

    def make(self, *args: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.bin), "HOME": str(self.home)}
        return subprocess.run([self.make_path, "-s", *args], cwd=self.root, env=env, text=True,
                              capture_output=True, timeout=60)


@pytest.fixture
def sandbox(tmp_path):
    if not shutil.which("make"):
        pytest.skip("needs make")
    return Sandbox(tmp_path)


SHIM = "echo 'command not found' >&2; exit 127"


def test_python_is_found_behind_a_failing_shim_and_an_old_one(sandbox):
    sandbox.put(sandbox.bin / "python3.13", SHIM)
    sandbox.put(sandbox.bin / "python3.12", SHIM)
    sandbox.put_python(sandbox.bin / "python3", "3.11.7")
    versions = sandbox.home / ".pyenv" / "versions"
    sandbox.put_python(versions / "3.9.18" / "bin" / "python", "3.9.18")
    good = sandbox.put_python(versions / "3.12.1" / "bin" / "python", "3.12.1")
    assert sandbox.make("python").stdout.strip() == str(good)
    sandbox.put_python(sandbox.bin / "python3.12", "3.12.0")
    assert sandbox.make("python").stdout.strip() == "python3.12"


def test_a_missing_python_is_a_sentence(sandbox):
    sandbox.put(sandbox.bin / "python3.12", SHIM)
    sandbox.put_python(sandbox.bin / "python3", "3.11.7")
    result = sandbox.make("venv")
    assert result.returncode and "No Python >= 3.12" in result.stderr
    assert "tried: python3.13 python3.12 python3 " in result.stderr
    assert not (sandbox.root / ".venv").exists()


def test_an_explicit_python_is_taken_or_refused(sandbox):
    sandbox.put_python(sandbox.bin / "python3.13", "3.13.0")
    mine = sandbox.put_python(sandbox.home / "my tools" / "py", "3.12.4")
    assert sandbox.make("python", f"PYTHON={mine}").stdout.strip() == str(mine)
    sandbox.put_python(mine, "3.11.0")
    result = sandbox.make("python", f"PYTHON={mine}")
    assert result.returncode and f"tried: {mine}." in result.stderr


def put_venv_maker(sandbox: Sandbox, pip_status: int) -> None:
    """A python3.12 whose environments hold a python that logs its arguments and then fails."""
    sandbox.put(sandbox.bin / "python3.12", f"""
        [ "$1" = -c ] && exit 0
        [ "$*" = "-m venv --clear .venv" ] || exit 3
        rm -rf .venv; mkdir -p .venv/bin
        echo 'echo "$@" >> log; exit {pip_status}' > .venv/bin/python
        chmod +x .venv/bin/python""")


def installs(sandbox: Sandbox) -> list[str]:
    log = (sandbox.root / "log").read_text().splitlines()
    return [line for line in log if line.startswith("-m pip install")]


def test_an_interrupted_environment_is_made_anew(sandbox):
    put_venv_maker(sandbox, pip_status=1)
    assert sandbox.make("venv").returncode
    put_venv_maker(sandbox, pip_status=0)
    assert sandbox.make("lint").returncode == 0
    assert len(installs(sandbox)) == 2 and installs(sandbox)[1].endswith("-e .[test]")
    assert sandbox.make("lint", "test", "ablation").returncode == 0
    assert len(installs(sandbox)) == 2
    stamp = sandbox.root / ".venv" / ".done-none"
    for name in ("setup.cfg", "constraints.txt"):
        os.utime(stamp, (0, 0))
        os.utime(sandbox.root / name, (10, 10))
        assert sandbox.make("venv").returncode == 0
    assert len(installs(sandbox)) == 4


def test_targets_run_what_they_say(sandbox):
    put_venv_maker(sandbox, pip_status=0)
    assert sandbox.make("ablation", "ARGS=--preset=smoke").returncode == 0
    assert sandbox.make("test-fast", "WORKERS=3").returncode == 0
    log = (sandbox.root / "log").read_text()
    assert "launch.py --experiment=scaling_ablation --preset=smoke\n" in log
    assert "-m pytest -n 3 --dist loadfile --durations=10 -m not slow\n" in log


@pytest.mark.parametrize("smi, extra", [
    ("echo '580.65.06, 9.0'; echo '580.65.06, 9.0'", "test,cuda13"),
    ("echo '580.65.06, 7.0'", "test,cuda12"),
    ("echo '535.129.03, 9.0'", "test,cuda12"),
    ("echo '470.57, 8.0'", "test"),
    ("echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9", "test"),
])
def test_gpu_packages_follow_the_driver(sandbox, smi, extra):
    put_venv_maker(sandbox, pip_status=0)
    sandbox.put(sandbox.bin / "nvidia-smi", smi)
    assert sandbox.make("venv").returncode == 0
    assert installs(sandbox)[-1].endswith(f"-e .[{extra}]")
    assert sandbox.make("venv", "GPU=none").returncode == 0
    assert installs(sandbox)[-1].endswith("-e .[test]")
