"""Custom ops that TensorRT lacks: one folder for each plugin.

`PLUGINS` maps the name for ``--plugin`` to the `Plugin` object.
"""

from __future__ import annotations

PLUGINS: dict[str, str] = {
    "correlation_lookup": "pipeline.plugins.correlation_lookup:PLUGIN",
}
