"""Memory of tensors, page by page: given back to the system before the tensor itself ends."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor


def is_owned(tensor: Tensor) -> bool:
    """Whether nothing but `tensor` has its numbers: no view, no other name."""
    # the tensor's own reference, and that of the object which is asked
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2)


def give_back(tensor: Tensor) -> None:
    """Give the memory of a contiguous tensor back while it exists: nobody may read its numbers again.

    As far as it fills whole pages, where the system is Linux.
    """
    if sys.platform == "linux":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
