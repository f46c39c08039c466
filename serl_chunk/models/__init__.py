"""Neural networks (flax.linen)."""
