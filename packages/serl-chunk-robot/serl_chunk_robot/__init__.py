"""The robot's side of serl_chunk, for PCs with Python 3.8 or newer: the wire format that both sides share."""

__version__ = "0.1.0"
