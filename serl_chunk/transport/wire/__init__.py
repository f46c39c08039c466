"""Messages: their encoding and their kinds."""
