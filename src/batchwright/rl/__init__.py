"""Rollouts in, batches out: sequences by column, advantages, and the ledger of who was asked what."""

__all__: list[str] = []
