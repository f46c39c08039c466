"""A run's report, and several runs compared: pages, panels of curves, tables."""
