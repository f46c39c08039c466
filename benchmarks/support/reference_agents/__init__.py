"""The published equations written plainly: one jitted update a call, one optimiser over everything. See updates.py."""
