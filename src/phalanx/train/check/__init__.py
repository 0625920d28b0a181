"""The check of a task before its first step: one device, a few samples, about a second."""
