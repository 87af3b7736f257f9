"""Opens models in ONNX Runtime, and runs them.

`open_session` holds the options for all sessions. ONNX Runtime's optimisations are off, because
they could hide a wrong rewrite.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import InputError
from pipeline.machine.polygraphy import without_torch
from pipeline.spec.tensors import Feed, Precision

if TYPE_CHECKING:
    import onnxruntime

FIRST_RUNS, COMPARED_RUNS = 30.0, 3600.0  # seconds of a run at small sizes, and at any size
_FATAL = 4  # the log's severity
# ONNX Runtime has no error of its own for this: the C++ exception, and its allocator's words
_NO_MEMORY = re.compile(r"std::bad_alloc|Failed to allocate memory")
_FOLDER = "session.model_external_initializers_file_folder_path"


def open_session(
    model: Path | bytes,
    *,
    weights: Path | None = None,
    one_thread: bool = False,
    by_priority: bool = False,
    time_limit: float = FIRST_RUNS,
) -> onnxruntime.InferenceSession:
    """Opens a model in ONNX Runtime on the CPU.

    Args:
        model: The ONNX file, with its external data beside it, or the model's bytes.
        weights: The folder of the external data, if `model` is bytes.
        one_thread: True for small graphs, where starting threads costs more than it saves.
        by_priority: True to run each node as soon as its inputs are ready. A value is then freed
            after its last use, even in a graph with thousands of other outputs.
        time_limit: The seconds of one run. A Loop of somebody else's file may never end.

    Raises:
        MemoryError: The memory is too short, to open the model or in a run of the session.
        Exception: ONNX Runtime refuses the model. Its errors have no common base.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # a fusion or a folded constant could hide a wrong rewrite, or compute it away
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False  # frees the memory after each run
    # idle threads wait without using the core: others may need it
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = _FATAL  # the raised exception has the same text
    options.intra_op_num_threads = 1 if one_thread else _threads()
    if by_priority:
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if weights is not None:
        options.add_session_config_entry(_FOLDER, str(weights))
    source = model if isinstance(model, bytes) else str(model)
    with _short_memory():
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return _limited(session, time_limit)


def _threads() -> int:
    """The number of a session's threads: 0 for ONNX Runtime's default.

    The default has a thread on each core of the machine, also on those that the process may not
    use. So a process with fewer cores has a thread for each of its own.
    """
    if sys.platform != "linux":
        return 0
    own = len(os.sched_getaffinity(0))
    return own if own < (os.cpu_count() or own) else 0


class LateRun(InputError):
    """A run took longer than the time limit."""


@contextlib.contextmanager
def _short_memory() -> Iterator[None]:
    """Raises MemoryError in place of an error that blames the node that ran at the time."""
    try:
        yield
    except Exception as error:
        if _NO_MEMORY.search(str(error)):
            raise MemoryError("ONNX Runtime is out of memory") from error
        raise


def _limited(
    session: onnxruntime.InferenceSession, time_limit: float
) -> onnxruntime.InferenceSession:
    """The session, with runs that end after the time limit. After one such run, none begins.

    ONNX Runtime checks its flag before each node, also inside of a Loop. A single kernel runs to
    its end.
    """
    import onnxruntime

    whole = session.run
    late = threading.Event()
    words = f"a run took longer than {time_limit:g} s. Check that every Loop of the model ends"
    too_late = LateRun(words)

    def run(names: Any, feed: Any, how: Any = None) -> Any:
        how = how or onnxruntime.RunOptions()

        def end() -> None:
            late.set()
            how.terminate = True

        if late.is_set():
            raise too_late
        timer = threading.Timer(time_limit, end)
        timer.daemon = True
        timer.start()
        try:
            with _short_memory():
                return whole(names, feed, how)
        except Exception as error:
            if late.is_set():
                raise too_late from error
            raise
        finally:
            timer.cancel()

    session.run = run
    return session


@dataclass(frozen=True)
class OnnxRunner:
    """Runs an ONNX file in ONNX Runtime; see `pipeline.spec.runner.Runner`.

    Args:
        model: The file, with its external data beside it.
        name: The name of the run in messages.
        precision: The precision that the file computes in.
    """

    model: Path
    name: str = "onnx"
    precision: Precision = "fp32"

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """The outputs by name, feed by feed. One session runs all feeds and is then freed."""
        return run_onnx(self.model, feeds)


def run_onnx(model: Path, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
    """Runs a model in ONNX Runtime on the CPU without optimisations: the outputs by name.

    Each DFT is computed in float64, see `pipeline.graph.dft`.
    """
    from polygraphy.backend.onnxrt import OnnxrtRunner

    from pipeline.graph.dft import exact_dft

    without_torch()
    wider = exact_dft(model)
    session = open_session(
        model if wider is None else wider,
        weights=None if wider is None else model.parent,
        time_limit=COMPARED_RUNS,
    )
    with OnnxrtRunner(session, name=model.stem) as runner:
        for feed in feeds:
            yield {name: np.asarray(v) for name, v in runner.infer(dict(feed)).items()}


def run_reference(model: bytes, feeds: Iterable[Feed]) -> list[dict[str, np.ndarray]]:
    """Runs a small model in memory: the outputs by name, feed by feed."""
    session = open_session(model, one_thread=True)
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(None, dict(feed)), strict=True)) for feed in feeds]
