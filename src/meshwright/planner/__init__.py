"""Planning: time, memory and bytes before a run (`api.plan`)."""
