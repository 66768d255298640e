"""python -m brigade"""

from brigade.course.cli.main import program

program()
