"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used: which one, what is wrong, and what can be done."""


class UnreadableError(CheckpointError):
    """Files are missing, cut short or not of this library: an older checkpoint may do."""
