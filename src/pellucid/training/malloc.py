"""Tell the C library to keep the pages of freed activations for the next step.

glibc hands every large block back to the kernel when it is freed; a training step frees and asks for the same
large blocks over and over, and each time their pages are zeroed and faulted in again. Kept pages made steps
of a middle-sized model 1.2 to 1.5 times as fast on a CPU. The price: memory that was used once stays with
the process. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = -1
_MMAP_FROM = 2**30
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed blocks below 1 GiB in the process; whether that was done.

    It is not done where the C library is another one, or where the environment already sets these.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or any(map(os.environ.get, _OWN_SETTINGS)):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )
