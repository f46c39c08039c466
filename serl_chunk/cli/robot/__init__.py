"""`serl-chunk robot`: the commands of a robot's PC, and those that read episodes."""
