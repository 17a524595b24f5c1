"""Search for workloads and fault schedules that fail, and shrink each failure found (hypothesis does both)."""
