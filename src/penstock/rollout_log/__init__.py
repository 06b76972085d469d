"""Prompts and their rollouts in a folder: nothing is lost and nothing is used twice, whatever dies."""

from penstock.rollout_log.log import RolloutLog
from penstock.rollout_log.prompts import Job

__all__ = ["Job", "RolloutLog"]
