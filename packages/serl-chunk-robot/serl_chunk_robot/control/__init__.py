"""One pass of the robot server: where it goes, how it yields, grips, moves to a pose, and what checks its driver."""
