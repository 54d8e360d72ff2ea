"""The command line: commands, their options, recipes, and the commands that train nothing.

A command parses its options, builds a method and its data, and calls the other folders, which compute.
Begin with commands.py; options.py has the parser (LightningCLI), recipes.py finds the file that ``--config`` names.
"""
