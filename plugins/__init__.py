"""Custom ops that TensorRT lacks: one folder a plugin. None yet."""
