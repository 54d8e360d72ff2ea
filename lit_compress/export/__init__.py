"""From a finished run to a folder that loads anywhere."""
