"""What ranks run in the tests of the toolkit. The tests import these files, and `run_ranks` sends their text."""
