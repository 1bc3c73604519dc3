"""A real Chromium, driven by playwright-core through node."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("driver.mjs")
PLAYWRIGHT = "playwright-core@1.56.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-unitscale"


class Missing(Exception):
    """Error that names what the tests lack on this machine."""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    raise Missing("no chromium on the path: install Debian's package `chromium`")


def packages() -> Path:
    """Return the folder with playwright-core, which is not downloaded while tests run."""
    if shutil.which("node") is None:
        raise Missing("no node on the path: install Debian's package `nodejs`")
    if not (CACHE / "node_modules/playwright-core").is_dir():
        raise Missing(f"no {PLAYWRIGHT} in {CACHE}: run `make browser`, which fetches it by npm")
    return CACHE


def fetch() -> None:
    """Download playwright-core, once."""
    if (CACHE / "node_modules/playwright-core").is_dir():
        print(f"{PLAYWRIGHT} is in {CACHE}")
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(CACHE), PLAYWRIGHT]
    print(*command, flush=True)
    subprocess.run(command, check=True, timeout=120)


class Browser:
    """One page at a time; every action is answered before the next."""

    def __init__(self, profile: Path) -> None:
        command = ["node", str(DRIVER), str(packages()), chromium(), str(profile)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, action: str, **options: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"action": action, **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the browser ended; its last words are on stderr"
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{action} {options}: {answer['error']}")
        return answer["value"]

    def evaluate(self, script: str) -> Any:
        return self("evaluate", script=script)

    def wait(self, script: str) -> None:
        """Until the expression is true on the page."""
        self("wait", script=script)

    def close(self) -> None:
        self._process.communicate(timeout=30)


if __name__ == "__main__":
    fetch()
