"""Transformation between the robot's units and model space, and its statistics."""
