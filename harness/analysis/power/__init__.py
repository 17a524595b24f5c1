"""Power of GPUs by phase of a job: measured levels, dips, and the model that they calibrate."""
