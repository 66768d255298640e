"""Grade one submission or a whole class. Only ranks import submissions; this package computes the scores."""
