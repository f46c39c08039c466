"""The commands of `serl-chunk`: flags, wiring of rooms, lines for a terminal."""
