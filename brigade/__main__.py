"""python -m brigade"""

from brigade.cli.main import program

program()
