"""Known vulnerabilities of the versions in constraints.txt, where an index answers.

Run: ``python .ci/audit.py PATH_OF_PIP_AUDIT``. Exits with 1 only if there are some.
"""

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
SECONDS = 120


def main(program: str) -> None:
    """Ask, print what was answered, and exit with 1 if that is a vulnerability."""
    command = [program, "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        packages = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        print(f"constraints.txt is not audited: no index has answered ({type(error).__name__})")
        return
    answered = [package for package in packages if "vulns" in package]
    print(f"pip-audit: an index knows {len(answered)} of {len(packages)} pinned versions")
    vulnerable = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version'}"
        for package in answered
        for vulnerability in package["vulns"]
    ]
    if vulnerable:
        sys.exit("\n".join(vulnerable))


if __name__ == "__main__":
    main(*sys.argv[1:])
