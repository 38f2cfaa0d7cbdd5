"""Errors that several parts of the package raise or tell apart."""

import torch

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "Overflow when unpacking long",
)
"""Texts in the RuntimeErrors that torch raises if the CPU is out of memory, or if a tensor would be larger than any."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a GPU, torch on the CPU or Python itself ran out of memory."""
    has_text = any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or has_text


def first_line(error: Exception) -> str:
    """Return the first line of the message of an out-of-memory error, as `out of memory: …`."""
    message = str(error).strip() or "Python has no more"  # a MemoryError of Python has no message
    return f"out of memory: {message.splitlines()[0]}"


class DivergedError(ArithmeticError):
    """Error of a run whose policy, or all data to learn from, is not finite.

    The message says which setting to change.
    """
