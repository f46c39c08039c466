"""LeRobot data sets, read and written without lerobot: v3.0, and v2.1 for programs that still want it."""
