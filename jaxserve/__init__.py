"""jaxserve: a JAX/XLA inference engine for language models."""

__version__ = "0.1.0"
