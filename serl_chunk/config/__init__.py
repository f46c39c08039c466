"""Experiments as frozen, validated dataclasses, without JAX."""
