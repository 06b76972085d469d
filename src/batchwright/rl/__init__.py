"""Reinforcement learning: rollouts by column, advantages, and the conventions of other libraries."""
