"""Pipeline parallelism for any PyTorch model."""

__version__ = "0.1.0"
