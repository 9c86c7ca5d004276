"""TensorRT as a second consumer of the plan: see docs/tensorrt.md."""
