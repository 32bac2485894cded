"""The embedded engine: PyTorch and transformers in a process of their own (``python -m engines.embedded``)."""
