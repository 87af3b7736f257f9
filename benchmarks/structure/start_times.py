"""CPU seconds of imports and of `pipeline --help`: python start_times.py CHECKOUT ...

The runs of several checkouts take turns, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

PYTHON = os.environ.get("PROOF_PYTHON", sys.executable)
RUNS = 11
COMMANDS = {
    "nothing": ["-c", "pass"],
    "import pipeline": ["-c", "import pipeline"],
    "import load": ["-c", "from pipeline import Artifact, ModelSpec, Profile, load"],
    "pipeline --help": ["-m", "pipeline", "--help"],
}


def seconds(words: list[str], checkout: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, *words], cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    checkouts = sys.argv[1:]
    for name, words in COMMANDS.items():
        for checkout in checkouts:
            seconds(words, checkout)  # fills the caches
        found = [[seconds(words, checkout) for checkout in checkouts] for _ in range(RUNS)]
        for checkout, times in zip(checkouts, zip(*found, strict=True), strict=True):
            print(
                f"{name:16} {checkout}: median {statistics.median(times):.3f} s of CPU time, "
                f"{min(times):.3f}..{max(times):.3f}"
            )


if __name__ == "__main__":
    main()
