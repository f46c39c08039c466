"""Environments and drivers behind one contract."""
