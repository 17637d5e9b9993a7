"""Configurations: strict reading of files and overrides, checks of fields, and registries of named implementations."""
