"""Typed columns: schemas, NumPy to and from Arrow, and the files that hold them."""
