"""Prompts and their rollouts in a folder: nothing is lost or used twice, whatever process dies."""

from batchwright.rollouts.log.log import RolloutLog
from batchwright.rollouts.log.prompts import PromptJob

__all__ = ["PromptJob", "RolloutLog"]
