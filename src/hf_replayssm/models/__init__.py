"""Patched modeling: one forward for each recurrence, and a table of the families with their small differences."""
