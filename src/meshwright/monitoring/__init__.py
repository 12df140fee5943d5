"""What a run reports: metrics, progress, trackers, profiles, the report page; the run directory."""
