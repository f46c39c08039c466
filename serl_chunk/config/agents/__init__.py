"""Settings of agents, one file each: frozen, validated, and free of JAX, so that a robot PC can read them cheaply.

`serl_chunk.agents.registry` maps each class to its implementation.
"""
