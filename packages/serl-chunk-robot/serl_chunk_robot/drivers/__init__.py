"""Drivers of robots: simulated ones, and a sample to copy."""
