"""The version of the package: pyproject.toml and every module read it here."""

__version__ = "0.3.0"
