"""Every error that Pellucid raises on purpose.

::

    PellucidError
    ├── InputError(ValueError)          an input cannot be used as it is
    │   ├── ArgumentError               the value of an argument
    │   ├── ConfigError                 a configuration key or value
    │   ├── DataError                   a corpus, file or record
    │   ├── ShapeError                  tensors or lengths that do not fit each other
    │   ├── LengthError                 a sequence beyond a position table or a cache's capacity
    │   ├── UnsupportedError            a backend or part cannot do what was requested
    │   ├── CheckpointError             a checkpoint folder that is incomplete or damaged
    │   │   └── MismatchError           … or does not match its contract (:mod:`pellucid.checkpoints`)
    │   │       ├── LoadError           its tensors: names, shapes or dtypes
    │   │       └── WitnessError        its outputs: not those recorded when it was saved
    │   └── RunError                    a run folder in a state that does not allow what was requested
    ├── TrainingError(RuntimeError)     a training run that must stop
    │   └── NotFiniteError              a loss or gradient is NaN or infinite (:mod:`pellucid.training`)
    └── StorageError(RuntimeError)      the disk failed or filled up while a run was writing to it

All of them can be imported from :mod:`pellucid`. An ``InputError`` names the value it met, the value it wanted, and
the way out, on one line: the command line prints it as it is and exits with 2. Our own mistakes are ``assert``s,
not these.
"""

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InputError",
    "LengthError",
    "PellucidError",
    "RunError",
    "ShapeError",
    "StorageError",
    "TrainingError",
    "UnsupportedError",
]


class PellucidError(Exception):
    """Base class of all errors below; catch this to catch all of them."""


class InputError(PellucidError, ValueError):
    """An input cannot be used as it is. Raised as one of the classes below."""


class ArgumentError(InputError):
    """The value of an argument is wrong: outside its range, of another kind, or in conflict with another argument."""


class ConfigError(InputError):
    """A configuration key or value is unknown, mistyped or contradicts another."""


class DataError(InputError):
    """A corpus, file or record is missing, empty or cannot be read."""


class ShapeError(InputError):
    """Tensors, sizes or lengths do not fit each other."""


class LengthError(InputError):
    """A sequence is longer than a position table or a cache's capacity."""


class UnsupportedError(InputError):
    """A backend or a part cannot do what was requested; nothing else was done in its place."""


class CheckpointError(InputError):
    """A checkpoint folder is incomplete, damaged, or does not match its contract."""


class RunError(InputError):
    """A run folder is in a state that does not allow what was requested: not a run, in use, already finished."""


class TrainingError(PellucidError, RuntimeError):
    """A training run must stop: continuing would damage the weights or the files."""


class StorageError(PellucidError, RuntimeError):
    """The disk is full, read-only or gone; what was complete before is still there."""


def one_line(error: BaseException, most: int = 300) -> str:
    """The message of an exception on one line of at most ``most`` characters; its class name if it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__
