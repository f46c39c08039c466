"""Processes of a robot server: its sockets, keys, leases and loop, cameras and input devices, and what it publishes."""
