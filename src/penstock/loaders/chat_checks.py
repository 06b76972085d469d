"""Placeholder until the checks are written."""
__all__ = ["refuse_bad"]
def refuse_bad(loader): pass
