"""python -m brigade.cli"""

from brigade.cli.main import program

program()
