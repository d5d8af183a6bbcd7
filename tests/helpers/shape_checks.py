"""A type checker for tests that looks at tensor shapes only.

Other arguments are hostile until Pellucid's own checks have seen them, and tests must meet those checks.
"""

from beartype import beartype


def shapes_only(function):
    """``beartype``, for the annotations that say a shape."""
    annotations = getattr(function, "__annotations__", {})
    shaped = {name: hint for name, hint in annotations.items() if "Tensor" in str(hint) and "[" in str(hint)}
    function.__annotations__ = shaped
    return beartype(function) if shaped else function
