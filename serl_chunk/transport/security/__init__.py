"""Keys, joining, and encryption (CURVE)."""
