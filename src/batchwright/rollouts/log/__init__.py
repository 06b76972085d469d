"""Prompts and their rollouts in a folder: nothing is lost and nothing is used twice, whatever dies."""

from batchwright.rollouts.log.log import RolloutLog
from batchwright.rollouts.log.prompts import Job

__all__ = ["Job", "RolloutLog"]
