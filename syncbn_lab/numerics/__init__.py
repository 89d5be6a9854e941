"""Float formats, error measures and derived error budgets; nothing here knows of processes."""
