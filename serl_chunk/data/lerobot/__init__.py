"""LeRobot data sets, read and written without lerobot: v3.0, and v2.1 for programs that still want it.

What a data set cannot say in LeRobot's terms (final observations, ends, which frames are new, decisions) lies beside it
in `meta/serl_chunk.parquet`, which lerobot ignores; see `serl_chunk.data.lerobot.sidecar`.
"""
