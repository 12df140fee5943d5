"""Reports of a run: metrics, progress, trackers, profiles, the report page; the run directory."""
