"""Writes an artifact's stored inputs and outputs as raw files, for a program without Python.

python examples/cpp/write_cases.py ARTIFACT FOLDER

The folder gets a ``.bin`` file for each tensor (little-endian, C order) and ``cases.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import Artifact, PipelineError
from pipeline.artifact.stored import stored_points


def write_cases(artifact: Artifact, folder: Path) -> int:
    """Writes every stored comparison, and returns their number."""
    manifest = artifact.manifest
    tolerances = manifest.engine_tolerances()
    folder.mkdir(parents=True, exist_ok=True)
    cases: list[dict[str, Any]] = []

    def tensor(name: str, value: np.ndarray, **more: float) -> dict[str, Any]:
        file = f"{len(cases)}-{len(list(folder.glob(f'{len(cases)}-*')))}.bin"
        value.astype(value.dtype.newbyteorder("<")).tofile(folder / file)
        shape, dtype = list(value.shape), value.dtype.name
        return {"name": name, "dtype": dtype, "shape": shape, "file": file, **more}

    for point in stored_points(artifact.path, manifest.reference):
        sizes = manifest.interface.sizes_of({name: a.shape for name, a in point.feed.items()})
        inputs = [tensor(name, value) for name, value in point.feed.items()]
        outputs = [
            tensor(name, value, rtol=tolerances[name].rtol, atol=tolerances[name].atol)
            for name, value in point.outputs.items()
        ]
        cases.append({"sizes": sizes, "inputs": inputs, "outputs": outputs})
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    return len(cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        count = write_cases(Artifact.open(arguments.artifact), arguments.folder)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{count} cases in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
