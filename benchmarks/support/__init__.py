"""Parts that the benchmark scripts share; none of them is a command."""
