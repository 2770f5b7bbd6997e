"""Going on with fewer pipeline stages, and taking them back. Pure but for the job managers."""
