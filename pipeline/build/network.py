"""Makes TensorRT's builder, network and parser. No other module makes them.

It uses calls that TensorRT 8.6, 10, 11 and TensorRT-RTX share, and checks for other flags by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.machine.gpu import find_gpu
from pipeline.machine.target import Target

_EXPLICIT_BATCH = 1  # flag bit 0 up to TensorRT 10; later versions ignore this bit


@dataclass(frozen=True)
class ParserError:
    """One error of TensorRT's parser.

    Args:
        text: The whole text: the node's number, the reason, and name and op if TensorRT knows them.
        why: The reason alone.
    """

    text: str
    why: str


@dataclass(frozen=True)
class OpenNetwork:
    """A network with its builder, parser and logger.

    TensorRT needs all of them while one of them is used.
    """

    parser: Any  # the first field is also freed first
    network: Any
    builder: Any
    logger: Any

    def parse_file(self, model: Path) -> list[ParserError]:
        """Parses an ONNX file with its external data. Returns no errors if TensorRT accepts it."""
        return self._errors(self.parser.parse_from_file(str(model)))

    def parse(self, model: bytes, path: Path | None = None) -> list[ParserError]:
        """Parses a model in memory. Returns no errors if TensorRT accepts the model.

        Args:
            model: The serialised model.
            path: A file in the folder of the external data, if there are any.
        """
        where = () if path is None else (str(path),)
        return self._errors(self.parser.parse(model, *where))

    def _errors(self, parsed: bool) -> list[ParserError]:
        if parsed:
            return []
        errors = [self.parser.get_error(n) for n in range(self.parser.num_errors)]
        found = [ParserError(str(error), error.desc()) for error in errors]
        return found or [ParserError("no reason given", "no reason given")]


def open_network(trt: Any, target: Target, logger: Any = None, builder: Any = None) -> OpenNetwork:
    """Makes an empty network of the target's kind, without Polygraphy.

    Args:
        trt: The target's TensorRT.
        target: A strongly typed target gets a strongly typed network, whose precision comes from
            the ONNX graph only.
        logger: Gets TensorRT's messages; by default only internal errors are printed.
        builder: A builder to use again; `logger` is then its logger.

    Raises:
        InputError: This TensorRT makes no builder on this machine. All but TensorRT-RTX need a GPU.
    """
    flags = _EXPLICIT_BATCH
    if target.strongly_typed and hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR) if logger is None else logger
    try:
        builder = trt.Builder(logger) if builder is None else builder
    except TypeError:  # the bindings' word for "TensorRT made none"
        gpu = find_gpu()
        why = f"it needs a GPU, and {gpu}" if isinstance(gpu, str) else "its log says why"
        raise InputError(f"target {target}: TensorRT makes no builder here: {why}") from None
    network = builder.create_network(flags)
    return OpenNetwork(trt.OnnxParser(network, logger), network, builder, logger)


def parsed_network(model: Path, target: Target) -> tuple[Any, Any, Any]:
    """Makes builder, network and parser of an ONNX file with Polygraphy.

    Polygraphy's logger collects TensorRT's messages of the parse and of the later build; see
    `pipeline.machine.polygraphy.collected`. The network has the same kind as in `open_network`.

    Raises:
        polygraphy.exception.PolygraphyException: The parser refuses the model. The collected
            messages have the errors.
    """
    from polygraphy.backend.trt import network_from_onnx_path

    return network_from_onnx_path(  # type: ignore[no-any-return]
        str(model), strongly_typed=True if target.strongly_typed else None
    )
