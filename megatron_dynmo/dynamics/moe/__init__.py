"""The load of experts: counted, and skewed on purpose."""
