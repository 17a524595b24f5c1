"""The bystander: a flow beside the workload that no fault should affect."""
