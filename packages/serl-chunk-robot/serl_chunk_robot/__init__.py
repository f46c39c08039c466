"""The robot's side of serl_chunk, for Python 3.8 or newer. Names in `__init__.pyi` are imported on first use."""

from serl_chunk_robot.exports import exported

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = exported(__name__, __file__)
