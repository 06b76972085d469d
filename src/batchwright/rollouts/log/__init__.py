"""Prompts and their rollouts in a folder. Nothing is lost or used twice, even if a process dies."""

from batchwright.rollouts.log.jobs import PromptJob
from batchwright.rollouts.log.log import RolloutLog

__all__ = ["PromptJob", "RolloutLog"]
