"""Reinforcement learning: rollouts by column, advantages, and the conventions of other libraries."""

__all__: list[str] = []
