"""Reinforcement learning for real robots in action chunks, with a human in the loop.

The names in `__init__.pyi` are imported on first use, so that `import serl_chunk` loads neither numpy nor JAX, and a
robot PC needs no JAX.
"""

from serl_chunk_robot.exports import exported

__all__, __getattr__, __dir__ = exported(__name__, __file__)
