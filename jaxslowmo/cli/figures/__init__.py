"""The pictures of the commands: one style, and a file for each."""
