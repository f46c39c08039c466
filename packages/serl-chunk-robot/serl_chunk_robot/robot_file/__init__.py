"""robot.toml: what it may hold, profiles and poses, and how what it names is loaded."""
