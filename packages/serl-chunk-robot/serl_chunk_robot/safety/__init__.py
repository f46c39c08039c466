"""What may move the robot, how far, and what stops it. Needs numpy alone; no module here reads a clock or a socket."""
