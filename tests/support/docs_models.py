"""What the pages tell their reader to have: files with small models, and small zoo models.

The zoo models stand in for large ones. They have the inputs and outputs of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import tiny

from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

ZOO = {name: f"docs_models:{name}" for name in ("raft", "raft_small", "unet_sr")}

CLASSIFIER = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 5)

    def forward(self, x):
        return self.head(x.mean((2, 3)))


def factory():
    torch.manual_seed(0)
    return Net()


net = factory
"""
# takes multiples of 8 only
UP_AND_DOWN = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = torch.nn.AvgPool2d(8), torch.nn.Upsample(scale_factor=8)

    def forward(self, x):
        # the next line is in own-model.md
        x = x + self.up(torch.relu(self.down(x)))
        return x.mean((2, 3))


def factory():
    return Net()
"""
MASKED = """import torch


class Net(torch.nn.Module):
    def forward(self, x, mask):
        valid = mask[:, :, None]
        return (x * valid).sum(1) / valid.sum(1)


def net():
    return Net()
"""
SPEECH = """import torch


class Encoder(torch.nn.Module):
    def forward(self, audio, lengths):
        valid = torch.arange(audio.shape[1]) < lengths[:, None]
        return (audio * valid).sum(1) / lengths


def encoder():
    return Encoder()
"""
DETECTOR = """import torch


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = torch.nn.Linear(3, 4), torch.nn.Linear(3, 2)

    def forward(self, x):
        cells = x[:, :, ::80, ::80].flatten(2).transpose(1, 2)
        return {"boxes": 640 * self.boxes(cells), "scores": self.scores(cells).softmax(-1)}


def detector():
    torch.manual_seed(0)
    return Detector()
"""
DECODER = """import torch


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100)

    def forward(self, ids, past):
        new = self.embed(ids).unflatten(-1, (2, 16)).transpose(1, 2)
        keys, values = (torch.cat([kept, new], dim=2) for kept in past)
        return self.head((new + values.mean(2, True)).transpose(1, 2).flatten(2)), (keys, values)


def decoder():
    torch.manual_seed(0)
    return Decoder()
"""
# the export differs from the run
DIFFERENT = """import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2 if torch.compiler.is_exporting() else x * 2 + 0.01}


def net():
    return Net()
"""
REMEMBERING = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        # keeps its first width
        if self.seen is None:
            self.seen = x.shape[-1]
        return x / self.seen


def net():
    return Net()
"""
ONNX = {
    "mean.onnx": "g (float[batch,4] x) => (float[batch,4] y) { y = Tanh(x) }",
    "float.onnx": "g (float[n,4] x) => (float[n,4] y) { y = Tanh(x) }",
    "quantised.onnx": "g (float[n,4] x) => (float[n,4] y) <float s = {0.0078125}, int8 z = {0}> "
    "{ t = Tanh(x) q = QuantizeLinear(t, s, z) y = DequantizeLinear(q, s, z) }",
    "decoder.onnx": "g (float[1,seq,4] x, float[1,past,4] kept, float[1,t] mask) => "
    "(float[1,t,4] y) <int64[1] axis = {2}> "
    "{ c = Concat<axis = 1>(kept, x) m = Unsqueeze(mask, axis) y = Mul(c, m) }",
    "relu6.onnx": "g (float[batch,3] x) => (float[batch,3] y) <float six = {6.0}> "
    "{ r = Relu(x) y = Min(r, six) }",
}


def write_onnx(path: Path, name: str) -> None:
    """Writes one of `ONNX`."""
    text = f'<ir_version: 8, opset_import: ["" : 18]> {ONNX[name]}'
    onnx.save(onnx.parser.parse_model(text), path)


def raft(*, updates: int = 12) -> ModelSpec:
    """A small network in place of RAFT."""
    return _flow("raft", {"updates": updates})


def raft_small() -> ModelSpec:
    """A small network in place of RAFT-small."""
    return _flow("raft_small", {})


def _flow(name: str, options: Mapping[str, object]) -> ModelSpec:
    def build(_: Path | None) -> Any:
        import torch

        class Net(torch.nn.Module):
            def forward(self, image1: torch.Tensor, image2: torch.Tensor) -> torch.Tensor:
                return torch.relu(image2 - image1)[:, :2]

        return Net()

    h, w = Dim("h", 135, 184, 240), Dim("w", 135, 248, 320)
    return ModelSpec(
        name=name,
        build=build,
        inputs=(Input("image1", (1, 3, h, w)), Input("image2", (1, 3, h, w))),
        outputs=(Output("flow", (1, 2, h, w), metric="end-point-error"),),
        tolerance=tiny.TOLERANCE,
        options=options,
    )


def unet_sr() -> ModelSpec:
    """A small network in place of the U-Net."""

    def build(_: Path | None) -> Any:
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 12, 1), torch.nn.PixelShuffle(2))

    batch, h, w = Dim("batch", 1, 4, 21), Dim("h", 20, 25, 40), Dim("w", 20, 25, 40)
    return ModelSpec(
        name="unet_sr",
        build=build,
        inputs=(Input("image", (batch, 3, h, w), low=0.0, high=1.0),),
        outputs=(Output("large", (batch, 3, 2 * h, 2 * w), metric="psnr"),),
        tolerance=tiny.TOLERANCE,
    )
