"""A program's end of a robot server: requests, published state, the server's clock."""
