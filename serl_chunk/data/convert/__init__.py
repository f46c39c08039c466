"""Conversion of data sets: in parallel, in order, resumable."""
