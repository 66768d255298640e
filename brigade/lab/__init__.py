"""The lab: training runs that are measured, drawn and compared."""

import logging

# Without a writable home directory, matplotlib warns that it keeps its font cache in a temporary directory.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
