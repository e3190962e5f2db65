"""The errors that a user can cause and mend. The command line and the app print their text and nothing else."""


class WorkbenchError(Exception):
    """Base of every error whose message is written for the user: what was wrong, what was expected, what to do."""


class UnsupportedModelError(WorkbenchError, ValueError):
    """An architecture or a configuration attribute that would give wrong numbers if it were ignored."""


class ModelNotFoundError(WorkbenchError, ValueError):
    """No model under that name, id or path."""


class CorruptWeightsError(WorkbenchError, ValueError):
    """A weights file that is truncated, fails its checksum, or lacks or exceeds the tensors of its configuration."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on any device, could not get the memory it asked for."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))
