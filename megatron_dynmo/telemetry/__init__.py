"""What a run tells: events.jsonl, scalars, and one live line."""
