"""Packaged experiments: one file per task."""
