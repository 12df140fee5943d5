"""Hyper-parameter search over training runs: a study, its workers, its page. Needs the extra `tune` (Optuna)."""
