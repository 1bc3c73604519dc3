"""The Makefile, the audit of pinned versions, and the mutations."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT, occurrences


def test_make_help_lists_every_target() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^make ([a-z-]+)  ", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets) and len(targets) > 10


def test_demo_installs_no_developer_tools(tmp_path: Path) -> None:
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (installed,) = re.findall(r"pip install .* -e '\.\[(.*)\]'", done.stdout)
    assert installed == "cli"


def _audit(tmp_path: Path, answer: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci/audit.py"), str(program)], capture_output=True, text=True
    )


KNOWN = """echo '{"dependencies": [
{"name": "tqdm", "version": "4.0", "vulns": [{"id": "CVE-1", "fix_versions": ["4.1"]}]},
{"name": "torch", "skip_reason": "not found"}], "fixes": []}'; exit 1"""


@pytest.mark.parametrize(
    ("answer", "returned", "said"),
    [
        (KNOWN, 1, "tqdm 4.0: CVE-1, mended in 4.1"),
        ('echo \'{"dependencies": [{"name": "tqdm", "vulns": []}]}\'', 0, "1 of 1 pinned"),
        ("echo no network >&2; exit 1", 0, "no index has answered"),
        ("echo '[]'", 0, "no index has answered"),
    ],
)
def test_only_a_known_vulnerability_fails_the_audit(
    answer: str, returned: int, said: str, tmp_path: Path
) -> None:
    done = _audit(tmp_path, answer)
    assert done.returncode == returned, done.stderr
    assert said in done.stdout + done.stderr


def test_every_mutation_quotes_existing_code() -> None:
    places = [(mutation.fault, occurrences(ROOT, mutation)) for mutation in MUTATIONS]
    assert [fault for fault, count in places if count != 1] == []


def test_every_mutation_names_existing_tests() -> None:
    missing = []
    for mutation in MUTATIONS:
        for name in mutation.tests.partition(" -k ")[0].split():
            file, _, test = name.partition("::")
            path = ROOT / "tests" / file
            is_found = path.exists() and test.partition("[")[0] in path.read_text()
            missing += [] if is_found else [name]
    assert missing == []


def _defined(path: Path) -> set[str]:
    """Return the functions and classes of a file, methods with their class, and constants."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_default_method_walkthrough_names_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("### The default method")[1]
    rows = re.findall(r"^\| `(\w+/\w+\.py)` \| ([^|]*) \|", section, re.MULTILINE)
    assert len(rows) == 12
    for file, names in rows:
        named = set(re.findall(r"`([\w.]+)`", names))
        assert named and named <= _defined(ROOT / "lightning_unitscale" / file), file
