"""The pipeline's errors, with the exit code of the command line for each.

Exit code 2: the input was bad and nothing was done. Exit code 1: a conversion or a comparison
failed. Each message is one line: what happened, where, and what to do. If a stage ends with several
findings, ``more`` lists them. A longer text (TensorRT's log, a table of guards) goes into
``detail``.
"""

from __future__ import annotations

import traceback
from typing import Any


class PipelineError(Exception):
    """Base of all errors that the pipeline raises on purpose.

    Attributes:
        more: Lines that `str` gives in place of the message, with all of it: one for each finding.
            Empty if there are none.
        kept: The folder with what a failed conversion made, and its files; empty if there is none.
    """

    exit_code = 1
    more = ""
    kept = ""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    def __str__(self) -> str:
        text = self.more or self.message
        return f"{text}\nkept: {self.kept}" if self.kept else text

    @property
    def message(self) -> str:
        """The message alone, without `more` and `kept`."""
        return super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the error with all its attributes: `machine.child` sends it between processes."""
        return _restored, (type(self), self.args, dict(vars(self)))


class InputError(PipelineError):
    """The caller passed something invalid: a wrong name, range, size or file."""

    exit_code = 2


class TargetMissing(InputError):
    """The TensorRT that the target names is not installed here."""


class ArtifactError(InputError):
    """An artifact is missing or incomplete, or differs from its manifest."""


class ExportError(PipelineError):
    """torch could not export the model, or exported something else than the spec declares.

    Args:
        line: ``file:line in function: code`` in the model, if the message names it.
        what: the message without that line.
        do: what to change in the model.
        others: more reasons of the same kind; they end the message.
    """

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        line: str = "",
        what: str = "",
        do: str = "",
        others: tuple[ExportError, ...] = (),
    ) -> None:
        parts = [f"{message}; {do}" if do else message, *map(str, others)]
        super().__init__("; also ".join(parts), detail=detail)
        self.line, self.what, self.do, self.others = line, what or message, do, others

    def of(self, model: str) -> ExportError:
        """The same error with the model's name before the message."""
        self.args = (f"model {model}: {self.message}",)
        return self


class SizeError(ExportError):
    """An input or output axis in the export differs from its declared size."""


class ConstraintError(ExportError):
    """The model does not accept every size that the spec declares.

    Args:
        rules: the model's rules on sizes, each a `pipeline.spec.rules.Rule`; empty if only a
            library's message is known.
        advice: the sentences of the message that are on no single rule.
    """

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        rules: tuple[Any, ...] = (),
        advice: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, detail=detail)
        self.rules, self.advice = rules, advice


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


class StoreError(PipelineError):
    """A shared store cannot be read or written."""


class EngineError(PipelineError):
    """A loaded engine failed: TensorRT or CUDA refused, or the engine is closed."""


class OutOfMemory(EngineError):
    """GPU memory is too short. The engine still works at smaller sizes.

    Args:
        wanted: the bytes that were requested; None if TensorRT requested them and did not say.
        free: the bytes that were free then.
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


# a mistake in the code that raises it, at every size
CODE_FAULTS = (AttributeError, NameError, TypeError, ImportError)
FAULT_ADVICE = "correct that line of the model, or pass the input that it needs"


def first_line(error: BaseException, empty: str | None = None) -> str:
    """The first line of an exception's message.

    Args:
        error: any library's exception.
        empty: the text for an exception without a message; by default the name of its class.
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__ if empty is None else empty


_LINES, _CHARACTERS = 4, 400  # of `first_lines`


def first_lines(error: BaseException) -> str:
    """The first lines of an exception's message as one line. The first may be a heading only.

    Args:
        error: any library's exception.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = ""
    for line in lines[:_LINES]:
        text += f"{'' if not text else ' ' if text.endswith(':') else '; '}{line}"
    cut = len(lines) > _LINES or len(text) > _CHARACTERS
    return f"{text[:_CHARACTERS]} ..." if cut else text


def ended_run(error: BaseException) -> str:
    """A sentence on user-supplied code that raised what is no `Exception`, such as `sys.exit()`.

    Args:
        error: the exception, as it was caught.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = type(error).__name__ + (f": {error}" if str(error) else "")
    return (
        f"{what} was raised at {frame.filename}:{frame.lineno} in {frame.name}. "
        "Remove it: a model must not end the program"
    )
