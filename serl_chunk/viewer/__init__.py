"""The episode viewer: a list of all episodes of a source, a page for each, and labels."""
