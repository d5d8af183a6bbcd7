"""Every error that Pellucid raises on purpose.

::

    PellucidError
    ├── InputError(ValueError)          what was handed in cannot be used as it is
    │   ├── ConfigError                 a configuration key or value
    │   ├── DataError                   a corpus, file or record
    │   ├── ShapeError                  tensors or lengths that do not fit each other
    │   └── CheckpointError             a folder that is not what it says it is
    ├── UnsupportedError(InputError)    a backend or part cannot do what was asked, and says so
    ├── LengthError(InputError)         past a position table, a window or a cache's capacity
    ├── TrainingError(RuntimeError)     a run that must not go on (a loss that is not finite)
    └── StorageError(RuntimeError)      a disk that took no more while a run was writing to it

An ``InputError`` names the value it met, the value it wanted, and the way out, on one line: the
command line prints it as it is and exits with 2. Our own mistakes are ``assert``s, not these.
"""


class PellucidError(Exception):
    """Base of everything below; catch this to catch all of them."""


class InputError(PellucidError, ValueError):
    """What was handed in cannot be used as it is."""


class ConfigError(InputError):
    """A configuration key or value is unknown, mistyped or contradicts another."""


class DataError(InputError):
    """A corpus, file or record is missing, empty or cannot be read."""


class ShapeError(InputError):
    """Tensors, sizes or lengths do not fit each other."""


class CheckpointError(InputError):
    """A checkpoint folder is incomplete, damaged, or not what it says it is."""


class UnsupportedError(InputError):
    """A backend or a part cannot do what was asked; nothing else was done in its place."""


class LengthError(InputError):
    """A sequence runs past a position table, or past a cache's capacity."""


class TrainingError(PellucidError, RuntimeError):
    """A run must not go on: going on would damage the weights or the files."""


class StorageError(PellucidError, RuntimeError):
    """The disk is full, read-only or gone; what was complete before is still there."""


def one_line(error: BaseException, most: int = 300) -> str:
    """What an exception says, on one line of at most ``most`` characters: its kind where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
