"""Runs the command line: ``python -m pipeline``."""

import sys

from pipeline.commands.main import main

sys.exit(main())
