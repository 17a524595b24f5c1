"""What a run leaves behind: measurements, samples, telemetry and kernel logs, in the files of a run directory."""
