"""A robot's operator within the control loop: keys, holds and stops, labels, consent, what a motion waits for."""
