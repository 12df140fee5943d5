"""Cleaning: rules that drop or mask documents, duplicate detection, decontamination, report."""
