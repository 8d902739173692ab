"""The processes of a run: how they start, find, stop and lose each other."""
