"""`python -m serl_chunk` is `serl-chunk`."""

from serl_chunk.main import main

if __name__ == "__main__":
    raise SystemExit(main())
