"""`serl-chunk doctor`: checks between this machine and a learner."""
