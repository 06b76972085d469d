"""Prompts and their rollouts in a folder: nothing is lost and nothing is used twice, whatever dies."""

from batchwright.rollout_log.log import RolloutLog
from batchwright.rollout_log.prompts import Job

__all__ = ["Job", "RolloutLog"]
