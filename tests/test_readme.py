"""README: links lead somewhere, the capability matrix is today's, the commands exist."""

import re
import shlex
from pathlib import Path

import launch
from experiments import readme
from tx_jax.attention import capability_matrix, implementations

ROOT = Path(launch.__file__).parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_capability_matrix_is_generated_from_the_declarations():
    assert readme.put(TEXT, "capabilities", capability_matrix()) == TEXT
    assert all(f"`{name}`" in TEXT or f"| {name}" in TEXT for name in implementations())


def test_every_command_shown_is_understood(capsys, monkeypatch):
    monkeypatch.setattr(launch, "start_devices", lambda wanted: None)
    commands = re.findall(r"^python launch.py (--exp[^#\n]+)", TEXT, re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        words = {w.replace("my_package.my_file:my_attend", "reference")
                 for w in shlex.split(command)} - {"--table"}
        words |= set() if "--help" in words else {"--explain"}
        status = launch.main(sorted(words))
        assert status == 0, (command, capsys.readouterr().err)


def test_the_walk_follows_the_imports_down():
    walk = TEXT[TEXT.index("## How a batch"):TEXT.index("## Swapping")]
    steps = re.findall(r"^\d+\. \[([^\]]+)\]", walk, re.MULTILINE)
    assert steps[0] == "launch.py" and len(steps) >= 8
