"""Run functions on ranks, watch them, end them, and say what they did. Nothing here knows the course."""
