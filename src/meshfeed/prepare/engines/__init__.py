"""Engines, which run the tasks that encode parts: processes of this machine, Ray, or Slurm."""
