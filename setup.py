"""The two parts of the build that pyproject.toml cannot express."""

import re
import sys
from pathlib import Path

from setuptools import setup

# The links to the folders at the top level. Without this check, a build from a clone without
# symbolic links succeeds, and its wheel lacks these three packages.
links = ["pipeline/models", "pipeline/passes", "pipeline/plugins"]
broken = " ".join(link for link in links if not Path(link).is_dir())
if broken:
    sys.exit(
        f"Cannot build trt-pipeline: not a directory: {broken}. "
        "Git wrote symbolic links as text files. "
        f"Run `git config core.symlinks true`, then `git checkout -- {broken}`. "
        "On Windows, turn on Developer Mode first."
    )

# A package index shows the README without the files that it links to, so only the text of such
# links stays. No public address of the repository is known that they could lead to.
readme = Path("README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", readme),
    long_description_content_type="text/markdown",
)
