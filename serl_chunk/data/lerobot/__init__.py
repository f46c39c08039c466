"""LeRobot data sets, read and written without lerobot: v3.0, and v2.1 for programs that still want it.

Fields that LeRobot lacks (final observations, ends, ticks of frames, decisions) are in `meta/serl_chunk.parquet`, which
lerobot ignores; see `serl_chunk.data.lerobot.sidecar`.
"""
