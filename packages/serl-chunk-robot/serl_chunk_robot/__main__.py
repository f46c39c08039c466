"""`python -m serl_chunk_robot` is `serl-chunk-robot`."""

from serl_chunk_robot.main import main

if __name__ == "__main__":
    raise SystemExit(main())
