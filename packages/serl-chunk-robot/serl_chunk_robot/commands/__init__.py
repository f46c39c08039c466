"""What the serl-chunk-robot command does besides serving: check, new, teach, measure, keys, requests."""
