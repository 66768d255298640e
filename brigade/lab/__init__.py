"""The lab: training runs that are measured, drawn and compared."""
