"""The recurrence as operators, one module each; every module starts with the PyTorch reference that defines it."""
