"""`penstock demo`: bake, train, kill, resume and trace in about a minute on this machine, without torch or network."""

__all__: list[str] = []
