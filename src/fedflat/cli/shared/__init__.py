"""Shared by all commands: flags, screen output, progress, error reporting."""
