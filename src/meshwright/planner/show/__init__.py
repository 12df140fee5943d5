"""Plans as JSON, text and pages."""
