"""`batchwright demo`: bake, train, kill, resume and trace in about a minute, without torch or network."""

__all__ = ["ONE_THREAD"]

ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS"), "1"
)
"""Threads of a matrix product may split its sums differently each time: with one, two processes agree in every bit.
And on a busy machine they wait for each other longer than they work. Set before NumPy is loaded."""
