"""The commands of `jaxserve`, one module each: `add_parser` declares the flags, `run` does the work."""
