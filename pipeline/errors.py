"""What can go wrong, and with which exit code the command line ends.

Exit code 2 says that the input was bad and nothing was done; 1 that a conversion or a
comparison failed. Each error is one line: what, where, and what to do. A longer text that
belongs to it (TensorRT's own words, a table of guards) goes into ``detail``.
"""

from __future__ import annotations

from typing import Any


class PipelineError(Exception):
    """Base of all errors that the pipeline raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled with all that it carries (`machine.child` sends errors between processes)."""
        return _restored, (type(self), self.args, dict(vars(self)))


class InputError(PipelineError):
    """The caller asked for something that can't be: a wrong name, range, size or file."""

    exit_code = 2


class TargetMissing(InputError):
    """The TensorRT that the target names is not installed here."""


class ArtifactError(InputError):
    """An artifact that is not there, not whole, or not what its manifest says."""


class ExportError(PipelineError):
    """torch could not export the model, or exported something other than what was asked.

    Args:
        line: ``file:line in function: code`` of the model, where the message names it.
        what: the message without that line.
    """

    def __init__(self, message: str, *, detail: str = "", line: str = "", what: str = "") -> None:
        super().__init__(message, detail=detail)
        self.line, self.what = line, what or message


class SizeError(ExportError):
    """The size of an input or output axis in the export is not what was declared."""


class ConstraintError(ExportError):
    """The model does not take every size that the spec declares.

    Args:
        rules: what it demands, each a `pipeline.spec.rules.Rule`; none where only a library's
            own text is known.
    """

    def __init__(self, message: str, *, detail: str = "", rules: tuple[Any, ...] = ()) -> None:
        super().__init__(message, detail=detail)
        self.rules = rules


class RewriteError(PipelineError):
    """A rewrite pass broke the graph or its contract."""


class BuildError(PipelineError):
    """TensorRT refused the network or could not build an engine from it.

    Args:
        nodes: the ONNX nodes that the message names as refused.
    """

    def __init__(self, message: str, *, detail: str = "", nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message, detail=detail)
        self.nodes = nodes


class CompareError(PipelineError):
    """Two runs of the same model disagree."""


class EngineError(PipelineError):
    """A loaded engine can't do what was asked: TensorRT or CUDA refused, or it is closed."""


class OutOfMemory(EngineError):
    """The GPU's memory does not suffice. The engine goes on working, with smaller sizes.

    Args:
        wanted: bytes that were asked for; None where TensorRT asked and did not say.
        free: bytes that were free then.
    """

    def __init__(self, message: str, *, wanted: int | None = None, free: int = 0) -> None:
        super().__init__(message)
        self.wanted, self.free = wanted, free


def _restored(
    kind: type[PipelineError], args: tuple[object, ...], state: dict[str, object]
) -> object:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def first_line(error: BaseException, empty: str | None = None) -> str:
    """The first line of an exception's message.

    Args:
        error: any library's exception.
        empty: the text for an exception without a message; by default the name of its class.
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__ if empty is None else empty
