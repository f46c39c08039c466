"""Inspection of data sets: checks, results, and an HTML page."""
