"""Prompts and their rollouts in a folder. Nothing is lost or used twice, even if a process dies."""

from batchwright.rollouts.log.log import RolloutLog
from batchwright.rollouts.log.prompts import PromptJob

__all__ = ["PromptJob", "RolloutLog"]
