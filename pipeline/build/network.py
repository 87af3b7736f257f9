"""TensorRT's builder, network and parser: the one place that makes them.

Only calls that 8.6, 10, 11 and TensorRT-RTX have in common are used, but for flags that are asked
for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.machine.target import Target

_EXPLICIT_BATCH = 1  # flag bit 0 up to TensorRT 10; later versions ignore that bit


@dataclass(frozen=True)
class ParserError:
    """One error of TensorRT's parser.

    Args:
        text: all of it: the node's number, its name and op where TensorRT knows them, and why.
        why: the reason alone.
    """

    text: str
    why: str


@dataclass(frozen=True)
class OpenNetwork:
    """A network with the builder that it is of and the parser that fills it.

    TensorRT wants all of them to live as long as one of them is used, the logger included.
    """

    parser: Any  # first, so that it also goes first
    network: Any
    builder: Any
    logger: Any

    def parse_file(self, model: Path) -> list[ParserError]:
        """Parses an ONNX file, its external data beside it; no errors if TensorRT takes it."""
        return self._errors(self.parser.parse_from_file(str(model)))

    def parse(self, model: bytes, path: Path | None = None) -> list[ParserError]:
        """Parses a model in memory; no errors if TensorRT takes it.

        Args:
            model: the serialised model.
            path: the file that external data are beside, if there are any.
        """
        where = () if path is None else (str(path),)
        return self._errors(self.parser.parse(model, *where))

    def _errors(self, parsed: bool) -> list[ParserError]:
        if parsed:
            return []
        errors = [self.parser.get_error(n) for n in range(self.parser.num_errors)]
        found = [ParserError(str(error), error.desc()) for error in errors]
        return found or [ParserError("no reason given", "no reason given")]


def open_network(trt: Any, target: Target, logger: Any = None) -> OpenNetwork:
    """An empty network of the kind that the target builds, made without Polygraphy.

    Args:
        trt: the target's TensorRT.
        target: strongly typed ones get strongly typed networks, in which precision stands in the
            ONNX graph only.
        logger: where TensorRT's messages go; by default only internal errors are printed.
    """
    flags = _EXPLICIT_BATCH
    if target.strongly_typed and hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR) if logger is None else logger
    builder = trt.Builder(logger)
    network = builder.create_network(flags)
    return OpenNetwork(trt.OnnxParser(network, logger), network, builder, logger)


def parsed_network(model: Path, target: Target) -> tuple[Any, Any, Any]:
    """Builder, network and parser of an ONNX file, made by Polygraphy.

    Polygraphy's logger collects what TensorRT says of the parse and of the build after it, for
    the manifest; see `pipeline.machine.polygraphy.collected`. The network is of the same kind as
    that of `open_network`.

    Raises:
        polygraphy.exception.PolygraphyException: the parser refuses the model; its errors are
            in what was collected.
    """
    from polygraphy.backend.trt import network_from_onnx_path

    return network_from_onnx_path(  # type: ignore[no-any-return]
        str(model), strongly_typed=True if target.strongly_typed else None
    )
