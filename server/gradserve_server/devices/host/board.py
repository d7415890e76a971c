"""The fields of a board, on which threads find work; see `sharing`. All are int64.

A module of its own, because the cache of compiled kernels looks at all files that `sharing` imports.
"""

SPINNING = 0
"""The number of helpers that watch the board, in its first row."""

CALLS = 1
"""The number of times that there was work for Python, in the first row."""

STATE = 0
"""The state of a job, 1 while it is open, in its row."""

INSIDE = 1
"""The number of helpers that work on a job, or look whether they may."""

CODE = 2
"""The address of a job's code."""

FRAME = 3
"""The address of its arguments."""

MOST_INSIDE = 4
"""The most helpers for a job."""

TICKET = 5
"""The number of a job, which no other job has."""

FIELDS = 16
"""The length of a row: two cache lines, so that threads with different jobs do not disturb each other."""
