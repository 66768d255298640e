"""The examples of docs/testing.md need nothing of the course."""

pytest_plugins = ["brigade.testing.plugin"]
