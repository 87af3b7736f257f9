"""Sessions of ONNX Runtime: which cores their threads use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest
from readme_commands import ROOT

SCRIPT = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {int(sys.argv[2])})
from pipeline.graph.session import open_session
session = open_session(Path(sys.argv[1]))
for thread in Path("/proc/self/task").iterdir():
    print(*os.sched_getaffinity(int(thread.name)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the cores of threads on Linux")
def test_a_session_keeps_to_the_cores_of_its_process(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this process has one core")
    text = "m (float[n, 4] x) => (float[n, 4] y) { y = Exp(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    onnx.save(model, tmp_path / "m.onnx")
    line = [sys.executable, "-c", SCRIPT, str(tmp_path / "m.onnx"), str(cores[0])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=environment, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {str(cores[0])}
