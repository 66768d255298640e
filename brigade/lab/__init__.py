"""The lab: training runs that are measured, drawn and compared."""

import logging

from brigade.ranks import dynamo_stub
from brigade.ranks.runner.options import MODES
from brigade.ranks.runner.server import SERVER

# Without a writable home directory, matplotlib warns that it keeps its font cache in a temporary directory.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

MODES["emulate"] = "brigade.lab.emulated_link:EmulatedLinkGroup"
SERVER.preload.add("brigade.lab.emulated_link")
dynamo_stub.postpone_imports()  # notebooks and commands import torch later
