"""Kinematics, their inverse, and rotations."""
