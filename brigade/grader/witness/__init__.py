"""The grader's witness: all communication of an isolated run on the CPU passes through the switch."""
