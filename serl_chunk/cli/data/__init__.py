"""`serl-chunk data`."""
