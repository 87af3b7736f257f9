"""What the files and folders of an artifact are called."""

from __future__ import annotations

PLAN = "engine.plan"


MODEL = "model.onnx"


EXPORTED = "exported.onnx"


HALF = "half.onnx"


COMPARISON = "comparison"


REPRODUCE = "reproduce.sh"


TIMING = "timing.cache"


MANIFEST = "manifest.json"


# Folders beside those of the profiles: points that no profile allows, and points whose stored
# outputs wait for a machine with more memory
OUTSIDE, LATER = RESERVED = ("outside", "later")
