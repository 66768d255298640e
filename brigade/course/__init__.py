"""The course: its table of modules, its checks, and the commands of students."""
