"""What travels between processes: messages, arrays, sockets and keys."""
