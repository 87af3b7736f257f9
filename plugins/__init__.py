"""Custom ops that TensorRT lacks: one folder a plugin.

`PLUGINS` is all there is: the name that ``--plugin`` takes, and where the `Plugin` is.
"""

from __future__ import annotations

PLUGINS: dict[str, str] = {
    "correlation_lookup": "pipeline.plugins.correlation_lookup:PLUGIN",
}
