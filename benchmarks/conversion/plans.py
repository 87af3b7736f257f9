"""Builds an artifact's model again and again, and counts how many different plans come out.

    python benchmarks/conversion/plans.py ARTIFACT [--builds N]

Each build runs as ``pipeline build`` on a copy of the artifact, in a process of its own. Put
``setarch -R`` before the command for processes whose memory begins at the same addresses.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pipeline.artifact.artifact import Artifact


def build(artifact: Path) -> bytes:
    """Returns the plan of a new build."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(artifact, Path(folder, "artifact"))
        line = [sys.executable, "-m", "pipeline", "build", str(copy)]
        subprocess.run(line, check=True, capture_output=True)
        return Artifact.open(copy).plan.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT")
    parser.add_argument("--builds", type=int, default=60, metavar="N")
    given = parser.parse_args()
    plans = [build(given.artifact) for _ in range(given.builds)]
    counts = Counter(hashlib.sha256(plan).hexdigest()[:12] for plan in plans)
    for key, count in counts.most_common():
        print(f"{key}: {count} of {given.builds} builds")
    first, *others = dict.fromkeys(plans)
    for other in others:
        differ = sum(one != two for one, two in zip(first, other, strict=False))
        print(f"{len(first)} and {len(other)} bytes: {differ} differ")


if __name__ == "__main__":
    main()
