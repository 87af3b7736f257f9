"""The names of an artifact's files and folders."""

from __future__ import annotations

PLAN = "engine.plan"


MODEL = "model.onnx"


EXPORTED = "exported.onnx"


HALF = "half.onnx"


RECIPE = "half.recipe"


COMPARISON = "comparison"


REPRODUCE = "reproduce.sh"


TIMING = "timing.cache"


TUNING = "tuning.json"


TUNING_PLOT = "tuning.svg"


INPUTS = "inputs.npz"


ENGINES = "engines"


MANIFEST = "manifest.json"


# in the folder that a failed conversion leaves, in place of a manifest: the error
FAILURE = "failure.txt"


# Folders beside those of the profiles: for sizes that no profile allows, and for sizes that need a
# machine with more memory
OUTSIDE, LATER = RESERVED = ("outside", "later")
