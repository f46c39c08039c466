"""What `transport.py` sets side by side, each in processes of its own. Nothing here is a command."""
