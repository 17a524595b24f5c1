"""Search for workloads and fault schedules that fail, and shrink what was found (hypothesis does both)."""
